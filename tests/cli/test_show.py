# SPDX-License-Identifier: Apache-2.0
"""`ls`, `stat`, `groups`, `rm`: what is there, and what may be removed."""

import json
import os
import subprocess
import sys

import pytest


def rings(run) -> dict[str, dict[str, object]]:
    return {ring["name"]: ring for ring in json.loads(run("ls", "--json").out)}


def test_ls_shows_a_live_ring_and_then_a_dead_one(ring, producer, run) -> None:
    source = producer()
    source.put(1, 3)
    row = next(line for line in run("ls").out.splitlines() if ring in line)
    assert source.generation[:8] in row
    assert "live" in row
    assert "[2,18] x 64 float32" in row
    source.kill()
    assert rings(run)[ring]["state"] == "dead"
    run("rm", ring)
    assert ring not in rings(run)


def test_ls_of_a_damaged_ring_says_what_is_wrong_and_lists_the_others(ring, producer, run) -> None:
    source, other = producer(), producer(name=f"{ring}b")
    with open(f"/dev/shm/shmconn.{ring}.{source.generation}", "r+b") as file:
        file.write(b"\xff")
    found = rings(run)
    assert found[ring]["state"] == "damaged"
    assert found[ring]["problem"]
    assert found[f"{ring}b"]["state"] == "live"
    assert "damaged" in run("ls").out
    assert "problem" in run("stat", ring).out
    source.kill()
    other.close()
    run("rm", ring, "--force")


def test_stat_shows_counters_losses_and_groups(ring, producer, shmconn, run, tmp_path) -> None:
    source = producer()
    source.put(1, 3)
    source.bury(4, "oversized")
    text = run("stat", ring).out
    assert "3 samples" in text
    assert "1 oversized" in text
    assert "(not subscribed yet)" in text
    facts = json.loads(run("stat", ring, "--json").out)
    assert facts["rings"][0]["published"] == 3
    assert facts["rings"][0]["lost_by_reason"] == {"oversized": 1}
    assert facts["rings"][0]["free_pages"] == facts["rings"][0]["pages"] - 3
    assert sum(facts["groups"][0]["unread"].values()) == 3
    source.kill()
    run("rm", ring)


def test_a_group_of_the_dead_is_shown_and_removed(ring, producer, shmconn, run, tmp_path) -> None:
    source = producer()
    drain = shmconn("drain", ring, "--to", tmp_path, "--group", "files")
    drain.says("writes to")
    assert "live members" in run("groups", "rm", ring, "files", code=2).err
    drain.kill()
    source.put(1, 2)
    row = next(line for line in run("groups", ring).out.splitlines() if "files" in line)
    assert "dead" in row
    assert f"pid {drain.child.pid}" in row
    assert "2" in row
    run("groups", "rm", ring, "files")
    assert "files" not in run("groups", ring).out
    source.close()


def test_removing_a_group_that_is_not_there_lists_those_that_are(ring, producer, run) -> None:
    source = producer(groups=["trainer"])
    error = run("groups", "rm", ring, "trainr", code=2).err
    assert "has no group 'trainr'" in error
    assert "trainer" in error
    run("groups", "rm", ring, "trainer")
    source.close()


def test_groups_with_the_wrong_words_says_how_to_write_it(run) -> None:
    assert "shmconn groups rm NAME GROUP" in run("groups", "rm", "q", code=2).err


def test_rm_keeps_a_live_ring(ring, producer, run) -> None:
    source = producer()
    assert f"pid {source.child.pid} writes to it" in run("rm", ring).out
    assert rings(run)[ring]["state"] == "live"
    source.close()


def test_rm_keeps_what_a_group_waits_for_unless_forced(ring, producer, run) -> None:
    source = producer(groups=["trainer"])
    source.put(1, 1)
    source.kill()
    assert "--force" in run("rm", ring).out
    assert rings(run)[ring]["state"] == "dead"
    assert "removed" in run("rm", ring, "--force").out
    run("groups", "rm", ring, "trainer", code=0 if _registry(ring) else 2)


def _registry(ring: str) -> bool:
    return os.path.exists(f"/dev/shm/shmconn.{ring}")


def test_every_command_of_a_ring_that_is_not_there_ends_with_2(ring, run) -> None:
    for words in (["stat", ring], ["groups", ring], ["rm", ring], ["groups", "rm", ring, "g"]):
        assert f"there is no ring '{ring}'" in run(*words, code=2).err


def test_a_name_that_is_no_name_ends_with_2(run) -> None:
    for command in ("stat", "groups", "rm"):
        assert "is not allowed" in run(command, "../etc", code=2).err


def test_version_is_the_packages(run) -> None:
    import shmconn

    assert run("--version").out == f"shmconn {shmconn.__version__}\n"


def test_every_command_has_help_with_examples(run) -> None:
    commands = ["drain", "ls", "stat", "groups", "rm", "top", "inspect", "doctor", "serve"]
    commands += ["verify", "bench"]
    top = run("--help").out
    for command in commands:
        assert command in top
        assert "Examples" in run(command, "--help").out


def test_an_output_pipe_that_is_closed_is_no_traceback(ring, producer) -> None:
    source = producer()
    command = f'"{sys.executable}" -c "from reader.cli import main; main()" ls --json | true'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    source.close()


def test_listing_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from reader.cli import app; app(['ls'], standalone_mode=False); "
        "sys.exit(bool({'torch', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        pytest.param("shmconn dra", ["drain"], marks=pytest.mark.long),
        ("shmconn drain q --format sp", ["specforge"]),
        ("shmconn stat {ring}", ["{ring}"]),
        pytest.param("shmconn drain --fol", ["--follow"], marks=pytest.mark.long),
    ],
)
def test_a_shell_completes_commands_options_formats_and_rings(
    ring, producer, line, completed
) -> None:
    source = producer()
    line = line.format(ring=ring[:-3]) if "{ring}" in line else line
    environment = os.environ | {
        "_SHMCONN_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    code = "import sys; sys.argv[0] = 'shmconn'; from reader.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.stdout.split() == [word.format(ring=ring) for word in completed]
    source.close()


def test_a_wrong_word_is_answered_with_the_right_one(run) -> None:
    assert "Did you mean 'drain'?" in run("drian", code=2).err
    assert "--format" in run("drain", "q", "--fromat", "x", code=2).err
