# SPDX-License-Identifier: Apache-2.0
"""Small meetings of a few actors, each of a kind that the protocol has a rule for."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from interleave import seams
from interleave.explore import Make
from interleave.scheduler import Chooser, Run, Touched
from interleave.world import World
from shmconn.directory import remove_rings
from shmconn.errors import NoSpace, NotReady, ProducerDied, RingMissing, SampleGone, SampleLost
from shmconn.handle import Handle
from shmconn.ring import Producer
from shmconn.subscription import Subscription

Script = Callable[[], None]


@dataclass(frozen=True)
class Scenario:
    """Who meets. ``prepare`` makes the ring and returns what each actor does."""

    name: str
    prepare: Callable[[World], dict[str, Script]]
    victims: tuple[str, ...] = ()
    kills: int = 0
    reborn: dict[str, Callable[[World], None]] | None = None
    never_wait: tuple[str, ...] = ("P",)


def maker(scenario: Scenario, name: str, again: str | None = None) -> Make:
    """Makes one schedule of a scenario after the other."""

    def make(chooser: Chooser, touched: Touched) -> tuple[Run, list[str]]:
        run = Run(chooser, touched)
        if again is not None:
            run.again = again.split()
            run.trace = []
        seams.begin(run)
        world = World(name, run)
        try:
            for actor, script in scenario.prepare(world).items():
                waits = actor not in scenario.never_wait
                run.add(actor, script, world.files.get(actor, []), waits=waits)
            run.victims, run.kills_left = scenario.victims, scenario.kills
            for victim in scenario.victims:
                # Its death frees its locks, so it is one of those who write there.
                for file in world.files.get(victim, []):
                    touched.note(victim, (), run.locks_of(file))
            run.reborn = {
                actor: lambda script=script: script(world)  # type: ignore[misc]
                for actor, script in (scenario.reborn or {}).items()
            }
            run.go()
            violations = list(run.violations)
            if not violations and not run.cut:
                violations = world.finish(killed=run.kills_left < scenario.kills)
            return run, violations
        finally:
            world.close()
            seams.begin(None)

    return make


def _ring(world: World, *groups: object, samples: int = 0, ttl_s: float = 600.0) -> Producer:
    with world.owned_by("P"):
        producer = world.create(*groups, ttl_s=ttl_s)
        for _ in range(samples):
            world.put(producer)
    return producer


def _member(world: World, actor: str, group: str, **options: bool) -> Subscription:
    with world.owned_by(actor):
        return world.join(group, **options)


def claims(world: World) -> dict[str, Script]:
    """Two members of a group claim and release while the producer takes back and publishes."""
    producer = _ring(world, "a", samples=1)
    one, two = _member(world, "A1", "a"), _member(world, "A2", "a")

    def produce() -> None:
        producer.reclaim()
        world.put(producer)

    return {"P": produce, "A1": lambda: world.attempt(one), "A2": lambda: world.attempt(two)}


def more_claims(world: World) -> dict[str, Script]:
    """The same, for longer: slots are used again."""
    producer = _ring(world, "a", samples=1)
    one, two = _member(world, "A1", "a"), _member(world, "A2", "a")

    def produce() -> None:
        for _ in range(3):
            world.put(producer)
            producer.reclaim()

    return {
        "P": produce,
        "A1": lambda: world.attempt(one, 2),
        "A2": lambda: world.attempt(two, 2),
    }


def takeover(world: World) -> dict[str, Script]:
    """A member dies with a lease, or just after its release; its mate looks at the same slot."""
    producer = _ring(world, "a", samples=1)
    one, two = _member(world, "A1", "a"), _member(world, "A2", "a")

    held = [world.claim(one)]

    def produce() -> None:
        producer.reclaim()
        world.put(producer)

    def go_on() -> None:
        world.release(one, held.pop())
        world.attempt(one)

    return {"P": produce, "A1": go_on, "A2": lambda: world.attempt(two)}


def newcomer(world: World) -> dict[str, Script]:
    """A second group registers while the first reads and the producer goes on."""
    producer = _ring(world, "a", samples=1)
    one = _member(world, "A1", "a")

    def produce() -> None:
        world.put(producer)
        producer.reclaim()

    return {"P": produce, "A1": lambda: world.attempt(one), "B": lambda: world.join("b") and None}


def newcomer_reads(world: World) -> dict[str, Script]:
    """The same, for longer, and the newcomer reads."""
    producer = _ring(world, "a", samples=1)
    one = _member(world, "A1", "a")

    def produce() -> None:
        producer.reclaim()
        world.put(producer)
        producer.reclaim()
        world.put(producer)

    def come() -> None:
        world.attempt(world.join("b"))

    return {"P": produce, "A1": lambda: world.attempt(one, 2), "B": come}


def dead_registrant(world: World) -> dict[str, Script]:
    """A newcomer dies while it registers and comes again; the first group leaves meanwhile."""
    producer = _ring(world, "a", samples=1)
    one = _member(world, "A1", "a")
    world.attempt(one)

    def produce() -> None:
        producer.reclaim()
        world.put(producer)
        producer.reclaim()

    def leave() -> None:
        world.leave(one, last=True)

    def come() -> None:
        world.attempt(world.join("b"))

    return {"P": produce, "A1": leave, "B": come}


def _come_again(world: World) -> None:
    world.attempt(world.join("b"))


def leave_and_come(world: World) -> dict[str, Script]:
    """The last group leaves while another comes."""
    producer = _ring(world, "a", samples=1)
    one = _member(world, "A1", "a")
    world.attempt(one)

    def produce() -> None:
        world.put(producer)
        producer.reclaim()
        world.put(producer)

    def leave() -> None:
        world.attempt(one)
        world.leave(one, last=True)

    def come() -> None:
        world.attempt(world.join("b"), 2)

    return {"P": produce, "A1": leave, "B": come}


def backlog(world: World) -> dict[str, Script]:
    """Samples that nobody has subscribed to, and two groups that come for them."""
    producer = _ring(world, samples=1)
    world.backlog = True

    def produce() -> None:
        producer.reclaim()
        world.put(producer)
        producer.reclaim()

    def come(group: str) -> Script:
        return lambda: world.attempt(world.join(group), 2)

    return {"P": produce, "A1": come("a"), "B": come("b")}


def mates_leave(world: World) -> dict[str, Script]:
    """Of two members one leaves while the other, maybe dead, has samples to come."""
    producer = _ring(world, "a", samples=1)
    one, two = _member(world, "A1", "a"), _member(world, "A2", "a")

    def produce() -> None:
        world.put(producer)
        producer.reclaim()

    def leave() -> None:
        world.leave(two)

    return {"P": produce, "A1": lambda: world.attempt(one, 1), "A2": leave}


def end(world: World) -> dict[str, Script]:
    """The producer publishes, then closes or dies; readers must read all before they end."""
    producer = _ring(world, "a")
    one, two = _member(world, "A1", "a"), _member(world, "A2", "a")

    def produce() -> None:
        world.put(producer)
        with world.may_wait():
            producer.close()

    def read(subscription: Subscription) -> Script:
        def to_the_end() -> None:
            try:
                world.read(subscription)
            except ProducerDied:
                if not world.run.victims:
                    world.run.violations.append("a closed ring is said to have died")
            _nothing_left(world, subscription)

        return to_the_end

    return {"P": produce, "A1": read(one), "A2": read(two)}


def _nothing_left(world: World, subscription: Subscription) -> None:
    """Whoever was told of an end saw all that was published, in each ring that there was."""
    if not subscription.ends:
        world.run.violations.append(f"{subscription.group} ended without having seen a ring")
    known = {end.generation: end.published for end in subscription.ends}
    for generation in world.rings:
        published = world.memory(generation)[seams.layout.PUBLISHED]
        unread = world.unclaimed(generation, subscription._member.group)
        if known.get(generation, 0) != published or unread:
            world.run.violations.append(f"the end came at {known} of {published}, with {unread}")


def restart(world: World) -> dict[str, Script]:
    """A generation has ended, the next one starts; a reader reads both or ends before."""
    producer = _ring(world, "a", samples=1)
    one = _member(world, "A1", "a")
    world.attempt(one)
    producer.close()

    def start() -> None:
        with world.may_wait():
            following = world.create("a")
        world.put(following)
        with world.may_wait():
            following.close()

    def read() -> None:
        with contextlib.suppress(ProducerDied):
            world.read(one)
        _nothing_left(world, one)

    return {"P": start, "A1": read}


def failing_start(world: World) -> dict[str, Script]:
    """A start fails for want of memory while somebody waits for the ring, in its group or not."""
    one = _member(world, "A1", "a")

    def fail() -> None:
        with contextlib.suppress(NoSpace), world.may_wait(), world.no_space():
            world.create("a", "b")

    def read() -> None:
        # Looks a few times: there is no ring, and so no end.
        for _ in range(3):
            if one.next(0) is not None or one.ended:
                world.run.violations.append("an end, or a sample, without a ring")

    def come() -> None:
        world.join("b")

    return {"P": fail, "A1": read, "B": come}


def came_and_went(world: World) -> dict[str, Script]:
    """A ring starts, closes without a sample, and is gone before the reader looks."""
    one = _member(world, "A1", "a")

    def come_and_go() -> None:
        with world.may_wait():
            producer = world.create()
            producer.close()

    def read() -> None:
        for _ in range(3):
            if one.next(0) is not None or (one.ended and not one.ends):
                world.run.violations.append("an end, or a sample, without a ring")

    return {"P": come_and_go, "A1": read}


def late_reader(world: World) -> dict[str, Script]:
    """The next generation starts before the reader comes that is owed the dead one's samples."""
    producer = _ring(world, "a", samples=1)
    producer.close()

    def start() -> None:
        with world.may_wait():
            following = world.create("a")
        world.put(following)
        with world.may_wait():
            following.close()

    return {"P": start, "A1": lambda: world.read(world.join("a"), 2)}


def comes_back(world: World) -> dict[str, Script]:
    """The last member of a group leaves while another comes to it."""
    producer = _ring(world, "a")
    one = _member(world, "A1", "a")

    def produce() -> None:
        world.put(producer)
        producer.reclaim()

    def come() -> None:
        subscription = world.join("a")
        # If the group was gone by then, what was published before was given up.
        row = subscription._member.group
        start = world.memory(producer.generation)[seams.layout.START + 8 * row]
        world.first[f"a {producer.generation}"] = max(1, start)
        world.attempt(subscription)

    return {"P": produce, "A1": lambda: world.leave(one), "A2": come}


def open_and_clean(world: World) -> dict[str, Script]:
    """The last member clears everything away while another comes, and a producer starts."""
    producer = _ring(world, "a")
    with world.owned_by("A1"):
        one = world.join("a")
    producer.close()
    world.rings.clear()

    def leave() -> None:
        world.leave(one, last=True)

    def come() -> None:
        world.attempt(world.join("b"))

    def start() -> None:
        with world.may_wait():
            following = world.create()
        world.put(following)

    return {"A1": leave, "B": come, "P": start}


def start_and_sweep(world: World) -> dict[str, Script]:
    """A ring is being made while somebody clears the dead ones."""
    with world.owned_by("A1"):
        one = world.join("a")

    def start() -> None:
        with world.may_wait():
            producer = world.create()
        world.put(producer)

    def clean() -> None:
        with contextlib.suppress(RingMissing):
            remove_rings(world.name)

    return {"P": start, "C": clean, "A1": lambda: world.read(one, 1)}


def handles(world: World) -> dict[str, Script]:
    """Two members ask for one request's sample; one gives it back; the producer expires."""
    producer = _ring(world, {"name": "h", "by_handle": True}, samples=1)
    one, two = (_member(world, actor, "h", by_handle=True) for actor in ("A1", "A2"))
    (handle,) = world.handles

    def give_back() -> None:
        with contextlib.suppress(NotReady, SampleGone):
            sample = one.get(handle, timeout=0)
            world.take(one, sample)
            (lease,) = one._member.leases
            world.holding.clear()
            lease.give_back()

    def ask() -> None:
        try:
            sample = two.get(handle, timeout=0)
        except NotReady:
            return
        except SampleGone as error:
            world.run.violations.append(f"nobody released it: {error}")
            return
        world.take(two, sample)
        world.release(two, sample)

    del producer
    return {"A1": give_back, "A2": ask}


def expiry(world: World) -> dict[str, Script]:
    """The producer expires a sample while it is asked for, by a member that may die."""
    producer = _ring(world, {"name": "h", "by_handle": True}, samples=2, ttl_s=-1.0)
    one, two = (_member(world, actor, "h", by_handle=True) for actor in ("A1", "A2"))
    first, second = world.handles
    held = [one.get(first, timeout=0)]
    world.take(one, held[0])

    def produce() -> None:
        producer.expire()
        producer.reclaim()
        world.put(producer)

    def ask(subscription: Subscription) -> None:
        for handle in (first, second):
            with contextlib.suppress(NotReady, SampleGone, SampleLost):
                sample = subscription.get(handle, timeout=0)
                world.take(subscription, sample)
                world.release(subscription, sample)
                del sample

    def go_on() -> None:
        world.release(one, held.pop())
        # Its own steps that follow are where it can be killed.
        one.unread()

    return {"P": produce, "A1": go_on, "A2": lambda: ask(two)}


def expiry_and_death(world: World) -> dict[str, Script]:
    """A member releases and dies while the producer expires what it held."""
    producer = _ring(world, {"name": "h", "by_handle": True}, samples=1, ttl_s=-1.0)
    one = _member(world, "A1", "h", by_handle=True)
    (handle,) = world.handles
    held = [one.get(handle, timeout=0)]
    world.take(one, held[0])

    def go_on() -> None:
        world.release(one, held.pop())
        one.unread()

    return {"P": lambda: producer.expire() and None, "A1": go_on}


def everybody(world: World) -> dict[str, Script]:
    """A producer, two members of a group, a second group, and a newcomer."""
    producer = _ring(world, "a", "b", samples=1)
    one, two = _member(world, "A1", "a"), _member(world, "A2", "a")
    other = _member(world, "B", "b")

    def produce() -> None:
        for _ in range(3):
            producer.reclaim()
            world.put(producer)

    def come() -> None:
        world.attempt(world.join("c"), 2)

    return {
        "P": produce,
        "A1": lambda: world.attempt(one, 2),
        "A2": lambda: world.attempt(two, 2),
        "B": lambda: world.attempt(other, 3),
        "C": come,
    }


def settling(world: World) -> dict[str, Script]:
    """A request is published, another buried, while both are asked for."""
    producer = _ring(world, {"name": "h", "by_handle": True})
    one = _member(world, "A1", "h", by_handle=True)
    handle = Handle.make(world.name, producer.generation, 1, f"request-1-of-{producer.generation}")
    lost = handle._replace(number=2)

    def produce() -> None:
        world.put(producer)
        producer.accept(2)
        producer.bury(2, f"request-1-of-{producer.generation}", "aborted")
        world.put(producer)

    def ask() -> None:
        for wanted in (handle, lost):
            while True:
                seen = world.run.memory
                try:
                    sample = one.get(wanted, timeout=0)
                except NotReady:
                    world.run.wait_for("change", seen)
                    continue
                except SampleLost:
                    if wanted is handle:
                        world.run.violations.append("a published sample is said to be lost")
                    break
                except SampleGone as error:
                    world.run.violations.append(f"nobody was given it: {error}")
                    break
                world.take(one, sample)
                world.release(one, sample)
                break

    return {"P": produce, "A1": ask}


_ALL = (
    Scenario("claims", claims),
    Scenario("more claims", more_claims),
    Scenario("takeover", takeover, victims=("A1",), kills=1),
    Scenario("newcomer", newcomer),
    Scenario("newcomer reads", newcomer_reads),
    Scenario("newcomer dies", newcomer, victims=("B",), kills=1, reborn={"B": _come_again}),
    Scenario(
        "dead registrant", dead_registrant, victims=("B",), kills=1, reborn={"B": _come_again}
    ),
    Scenario("leave and come", leave_and_come),
    Scenario("comes back", comes_back),
    Scenario("backlog", backlog),
    Scenario("mates leave", mates_leave, victims=("A1",), kills=1),
    Scenario("end", end),
    Scenario("death", end, victims=("P",), kills=1),
    Scenario("restart", restart),
    Scenario("late reader", late_reader),
    Scenario("came and went", came_and_went),
    Scenario("failing start", failing_start),
    Scenario("open and clean", open_and_clean),
    Scenario("start and sweep", start_and_sweep),
    Scenario("handles", handles),
    Scenario("expiry", expiry, victims=("A1",), kills=1),
    Scenario("expiry and death", expiry_and_death, victims=("A1",), kills=1),
    Scenario("settling", settling),
    Scenario("everybody", everybody, victims=("A1", "B", "C"), kills=1),
)
SCENARIOS = {scenario.name: scenario for scenario in _ALL}
