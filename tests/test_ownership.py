"""A run folder has one owner at a time, and all nodes of a job see it."""

import concurrent.futures
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from recsys import ownership, recipe_file
from recsys.distributed import process_group
from recsys.errors import UserError
from recsys.ownership import FILE, Ownership
from recsys.run_folder import RunFolder


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


def left_by(folder, **about) -> None:
    """An owner's file as another process leaves it."""
    owner = {"token": "theirs", "job": None, "host": "elsewhere", "pid": 1, "system": "another"} | about
    (folder / FILE).write_text(json.dumps(owner))


def test_a_second_owner_is_refused_until_the_first_has_released(tmp_path):
    first = Ownership(tmp_path)
    with pytest.raises(UserError, match=rf"in use.*process {os.getpid()} on \S+, heard of 0 s ago"):
        Ownership(tmp_path)
    first.release()
    assert list(tmp_path.iterdir()) == []
    Ownership(tmp_path).release()


def test_an_owner_on_another_host_is_gone_after_a_minute_of_silence(tmp_path):
    left_by(tmp_path)
    with pytest.raises(UserError, match="process 1 on elsewhere"):
        Ownership(tmp_path)
    old_s = time.time() - 61
    os.utime(tmp_path / FILE, (old_s, old_s))
    second = Ownership(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    second.release()


def test_an_owner_whose_process_on_this_host_has_ended_is_gone_at_once(tmp_path):
    code = "import os, sys; from pathlib import Path; from recsys.ownership import Ownership"
    subprocess.run([sys.executable, "-c", f"{code}; Ownership(Path(sys.argv[1])); os._exit(1)", tmp_path])
    assert (tmp_path / FILE).exists()
    Ownership(tmp_path).release()


def test_a_job_that_is_started_again_keeps_its_folder_and_another_job_does_not_get_it(tmp_path, monkeypatch):
    left_by(tmp_path, job="job 7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 8")
    with pytest.raises(UserError, match="job job 7, process 1 on elsewhere"):
        Ownership(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    Ownership(tmp_path).release()


def test_runs_without_an_id_of_the_launcher_are_no_one_job(tmp_path, monkeypatch):
    left_by(tmp_path, job="none")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's own default
    with pytest.raises(UserError, match="in use"):
        Ownership(tmp_path)


def test_a_file_that_is_still_being_written_counts_as_an_owner(tmp_path):
    (tmp_path / FILE).write_text("")
    with pytest.raises(UserError, match="in use"):
        Ownership(tmp_path)


def test_an_owner_is_heard_of_while_it_works_and_releases_only_what_is_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "_PERIOD_S", 0.05)
    first = Ownership(tmp_path)
    os.utime(tmp_path / FILE, (0, 0))
    end_s = time.monotonic() + 20
    while (tmp_path / FILE).stat().st_mtime == 0:
        assert time.monotonic() < end_s
        time.sleep(0.05)
    left_by(tmp_path)
    first.release()
    assert json.loads((tmp_path / FILE).read_text())["token"] == "theirs"


def test_of_many_that_find_an_owner_gone_one_takes_over(tmp_path):
    """Without turns several replace the file, each taking itself for the owner."""
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        left_by(folder)
        os.utime(folder / FILE, (1, 1))
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _, folder=folder: claimed(folder), range(8)))
        (owner,) = [one for one in found if one is not None]
        assert json.loads((folder / FILE).read_text())["token"] == owner._token
        assert [path.name for path in folder.iterdir()] == [FILE]
        owner.release()


def claimed(folder) -> Ownership | None:
    try:
        return Ownership(folder)
    except UserError:
        return None


def test_an_owner_that_was_asleep_finds_out_before_it_writes(tmp_path, monkeypatch):
    first = Ownership(tmp_path)
    first.require()
    left_by(tmp_path, job="8")
    first.require()  # it has been heard of a moment ago, so nobody can have taken over
    monkeypatch.setattr(first, "_heard_s", time.monotonic() - 31)
    with pytest.raises(UserError, match=r"taken over while this job was silent.*job 8"):
        first.require()
    first.release()
    assert json.loads((tmp_path / FILE).read_text())["job"] == "8"


def test_an_owner_whose_file_was_removed_claims_the_folder_anew(tmp_path, monkeypatch):
    first = Ownership(tmp_path)
    (tmp_path / FILE).unlink()
    monkeypatch.setattr(first, "_heard_s", time.monotonic() - 31)
    first.require()
    with pytest.raises(UserError, match="in use"):
        Ownership(tmp_path)
    first.release()
    assert list(tmp_path.iterdir()) == []


def test_process_ids_of_another_container_say_nothing(tmp_path):
    """Containers may share a host's name; root can make one's process ids."""
    owner = Ownership(tmp_path)
    code = "import sys; from pathlib import Path; from recsys.ownership import Ownership; Ownership(Path(sys.argv[1]))"
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", code, tmp_path]
    if subprocess.run([*command[:3], "true"], capture_output=True).returncode:
        pytest.skip("only root may do so here")
    done = subprocess.run(command, capture_output=True, text=True)
    assert "is in use" in done.stderr, done.stderr
    owner.release()


def test_a_folder_that_is_refused_is_given_up_again(tmp_path):
    from scripts.chaos import _prepare

    recipe = recipe_file.load(str(_prepare(tmp_path, epochs=1)))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(recipe.resolved().to_yaml())
    (tmp_path / "run" / "metrics.json").write_text("{}")
    other = recipe_file.load(str(tmp_path / "recipe.yaml"), ["train.seed=7"])
    with process_group("cpu") as ranks:
        for _ in range(2):
            with pytest.raises(UserError, match="has ended"):
                RunFolder.create(str(tmp_path / "run"), other, "r", ranks, goes_on=True)
    assert not (tmp_path / "run" / FILE).exists()


def test_two_runs_do_not_share_a_folder_of_checkpoints(tmp_path):
    from scripts.chaos import _prepare

    address = f"file://{tmp_path}/kept"
    recipe = recipe_file.load(str(_prepare(tmp_path, epochs=1)), [f"checkpoint.folder={address}"])
    with process_group("cpu") as ranks:
        first = RunFolder.create(str(tmp_path / "a"), recipe, "r", ranks)
        with pytest.raises(UserError, match=r"kept' is in use"):
            RunFolder.create(str(tmp_path / "b"), recipe, "r", ranks)
        first.close()
        assert list((tmp_path / "kept").iterdir()) == []
    assert not (tmp_path / "b" / FILE).exists()


def test_a_run_gives_its_folder_up_and_a_running_one_keeps_it(tmp_path):
    """Two real runs: the second asks for the folder of the first while it trains, and is told who has it."""
    from scripts.chaos import _prepare

    recipe = _prepare(tmp_path, epochs=2)
    command = [sys.executable, "-m", "recsys", "train", str(recipe), "--run-dir", str(tmp_path / "run")]
    command += ["--resume", "auto"]
    first = subprocess.Popen([*command, "train.epochs=200"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + 90
        while not (tmp_path / "run" / "train_loss.jsonl").exists():
            assert first.poll() is None and time.monotonic() < end_s
            time.sleep(0.1)
        before = (tmp_path / "run" / "recipe.yaml").read_text()
        second = subprocess.run([*command, "train.epochs=9"], capture_output=True, text=True, timeout=120)
        assert second.returncode == 2
        assert f"in use. Received: process {first.pid} on" in second.stderr
        assert (tmp_path / "run" / "recipe.yaml").read_text() == before
    finally:
        first.terminate()
    assert first.wait(60) == 75
    assert not (tmp_path / "run" / FILE).exists()


MEET = """
import os, pathlib, sys
from recsys.distributed import process_group
from recsys.errors import UserError
from recsys.ownership import require_shared
with process_group("cpu") as ranks:
    try:
        require_shared(pathlib.Path(sys.argv[1]) / "run", "run folder", ranks)
        os.write(1, b"shared\\n")
    except UserError as error:
        os.write(1, f"{error}\\n".encode())
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.dist
@pytest.mark.parametrize("separate", [False, True])
def test_a_folder_that_another_node_does_not_see_is_refused_on_all_ranks(tmp_path, separate):
    """Two ranks that count as nodes; the second has a file system of its own at that place, as only root can make."""
    private = ["unshare", "--mount", "sh", "-ec", f'mount -t tmpfs none {tmp_path}; exec "$@"', "sh"]
    if separate and subprocess.run([*private, "true"], capture_output=True).returncode:
        pytest.skip("only root may mount here")
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    script = [sys.executable, "-c", f"from recsys import ownership; ownership._SIGHT_S = 1\n{MEET}"]
    jobs = []
    for rank in range(2):
        own = {**rendezvous, "RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PYTHONPATH": os.getcwd()}
        command = [*(private if separate and rank else []), *script, str(tmp_path)]
        jobs.append(subprocess.Popen(command, env={**os.environ, **own}, stdout=subprocess.PIPE, text=True))
    said = [job.communicate(timeout=90)[0] for job in jobs]
    if separate:
        assert all("is not on storage that all nodes share" in text and "--run-dir" in text for text in said), said
    else:
        assert said == ["shared\n"] * 2
    assert list((tmp_path / "run").iterdir()) == []
