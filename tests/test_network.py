"""Which interface ranks talk through: on this machine, and between hosts made of network namespaces."""

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

from recsys import doctor, network
from recsys.errors import UserError

ROOT = pathlib.Path(__file__).parent.parent
LIMIT_S = 120
NET, HEAD, OTHER = "10.78.0", f"rn{os.getpid()}a", f"rn{os.getpid()}b"


@pytest.fixture(autouse=True)
def nobody_has_named_an_interface(monkeypatch):
    for name in (network.GLOO, network.NCCL):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(network, "_set_here", {})


def told_by_ip() -> set[tuple[str, str]]:
    """(interface, address) by iproute2, link-local addresses left out."""
    if not shutil.which("ip"):
        pytest.skip("needs iproute2 to compare with")
    found = json.loads(subprocess.check_output(["ip", "-json", "address"], text=True))
    return {
        (one["ifname"], address["local"]) for one in found for address in one["addr_info"] if address["scope"] != "link"
    }


def test_interfaces_and_addresses_are_those_that_iproute2_tells():
    assert {(one.name, one.address) for one in network.interfaces()} == told_by_ip()
    assert {one.name for one in network.interfaces() if one.is_loopback} == {"lo"}


def test_default_interface_is_that_of_the_default_route():
    if not shutil.which("ip"):
        pytest.skip("needs iproute2 to compare with")
    routes = json.loads(subprocess.check_output(["ip", "-json", "route", "show", "default"], text=True))
    if not routes:
        pytest.skip("no default route here")
    found = network.default()
    assert found is not None and found.name == min(routes, key=lambda route: route.get("metric", 0))["dev"]


def test_a_name_that_is_loopback_here_makes_the_default_route_decide_and_says_so():
    if network.default() is None:
        pytest.skip("nothing but loopback here")
    found = network.choose("127.0.1.1")
    assert not found.address.startswith("127.") and "127.0.1.1 here" in found.why


def test_loopback_between_hosts_is_an_error_that_names_host_address_and_variables(monkeypatch):
    monkeypatch.setattr(network, "default", lambda: None)
    with pytest.raises(UserError) as caught:
        network.choose("localhost")
    for part in (socket.gethostname(), "127.0.0.1", network.GLOO, network.NCCL):
        assert part in str(caught.value)
    monkeypatch.setenv(network.GLOO, "lo")
    with pytest.raises(UserError, match=r"GLOO_SOCKET_IFNAME=lo on .*, which is loopback"):
        network.choose("localhost")


def test_what_the_user_has_named_is_kept_and_what_we_set_is_not_taken_for_it(monkeypatch):
    choice = network.Choice("eth7", "10.0.0.1", "route")
    monkeypatch.setenv(network.NCCL, "^docker0")
    monkeypatch.setenv(network.GLOO, "")
    network.use(choice)
    assert (os.environ[network.GLOO], os.environ[network.NCCL]) == ("eth7", "^docker0")
    assert network.given(network.GLOO) is None and network.given(network.NCCL) == "^docker0"


@pytest.mark.parametrize(
    ("variable", "value", "is_there"),
    [
        (network.GLOO, "lo", True),
        (network.GLOO, "nope0", False),
        (network.GLOO, "lo,nope0", False),
        (network.NCCL, "l", True),  # a prefix
        (network.NCCL, "=l", False),
        (network.NCCL, "=lo", True),
        (network.NCCL, "nope0", False),
        (network.NCCL, "nope0,lo", True),
        (network.NCCL, "^nope0", True),
    ],
)
def test_an_interface_that_is_not_here_is_refused_with_those_that_are(variable, value, is_there, monkeypatch):
    monkeypatch.setenv(variable, value)
    if is_there:
        network.require_named(nccl=True)
    else:
        with pytest.raises(UserError, match=rf"{variable} names .* Received: {value}\. Allowed: lo \(127\.0\.0\.1\)"):
            network.require_named(nccl=True)
    network.require_named(nccl=False) if variable == network.NCCL else None


def test_speed_and_infiniband_are_what_the_drivers_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(network, "_SYS", tmp_path)
    assert network.speed_bits("lo") is None and network.infiniband_bits() == 0
    folder = tmp_path / "net" / "lo"
    folder.mkdir(parents=True)
    (folder / "ifindex").write_text(f"{socket.if_nametoindex('lo')}\n")
    for text, bits in (("25000\n", 25e9), ("-1\n", None)):
        (folder / "speed").write_text(text)
        assert network.speed_bits("lo") == bits
    (folder / "speed").write_text("25000\n")
    (folder / "ifindex").write_text("4711\n")
    assert network.speed_bits("lo") is None, "the file is of another network namespace"
    ports = [
        ("4: ACTIVE", "InfiniBand"),
        ("4: ACTIVE", "InfiniBand"),
        ("1: DOWN", "InfiniBand"),
        ("4: ACTIVE", "Ethernet"),
    ]
    for number, (state, layer) in enumerate(ports):
        port = tmp_path / "infiniband" / f"mlx5_{number}" / "ports" / "1"
        port.mkdir(parents=True)
        for name, text in (("state", state), ("link_layer", layer), ("rate", "400 Gb/sec (4X NDR)")):
            (port / name).write_text(f"{text}\n")
    assert network.infiniband_bits() == 800e9


def test_a_resolver_that_hangs_is_given_up_while_others_answer(monkeypatch):
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda name, *a, **k: time.sleep(60) or [] if name == "slow" else real(name, *a, **k)
    )
    start_s = time.monotonic()
    slow, known, unknown = network.resolve(["slow", "localhost", "absent.invalid"], timeout_s=0.5)
    assert time.monotonic() - start_s < 30, "the resolver's own 60 s are not waited for"
    assert slow.problem == "no answer in 0.5 s" and "127.0.0.1" in known.addresses
    assert unknown.addresses == () and unknown.problem


def test_the_doctor_waits_for_no_resolver_itself(monkeypatch):
    asking, given_up = [], threading.Event()

    def hang(*_args, **_settings) -> list:
        asking.append(threading.current_thread())
        if asking[-1] is not threading.main_thread():
            given_up.wait(LIMIT_S)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(network.resolve, "__defaults__", (0.2,))
    text, ok = doctor.network_report(["slow1", "slow2"])
    given_up.set()
    assert asking and threading.main_thread() not in asking
    assert not ok and "slow1 does not resolve: no answer in 0.2 s" in text


def test_hosts_of_a_job_are_those_that_schedulers_and_launchers_name(tmp_path, monkeypatch):
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$1 $2 $3" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in [key for key in os.environ if key.startswith(("SLURM_", "VC_", "TORCHX_", "MASTER_"))]:
        monkeypatch.delenv(name)
    assert network.job_hosts() == []
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("VC_TRAIN_0_HOSTS", "train-0-0.job")
    monkeypatch.setenv("VC_TRAIN_1_HOSTS", "train-1-0.job, train-1-1.job")
    monkeypatch.setenv("TORCHX_RANK0_HOST", "n1")
    assert network.job_hosts() == ["n1", "n2", "train-0-0.job", "train-1-0.job", "train-1-1.job"]


def test_doctor_tells_interface_address_and_names_and_fails_for_one_that_does_not_resolve(monkeypatch):
    text, ok = doctor.network_report(["localhost", "absent.invalid"])
    found = network.choose("localhost")
    assert not ok and f"between hosts   {found.interface} {found.address}" in text
    assert re.search(r"^  localhost +(127\.0\.0\.1|::1).* in [\d.]+ ms$", text, re.MULTILINE)
    assert "error: absent.invalid does not resolve: " in text
    assert "warning: localhost is loopback here" in text


def test_doctor_warns_of_loopback_for_one_host_and_refuses_it_for_several(monkeypatch):
    monkeypatch.setenv(network.GLOO, "lo")
    monkeypatch.setattr(network, "job_hosts", list)
    text, ok = doctor.network_report()
    assert ok and re.search(r"^warning: .*GLOO_SOCKET_IFNAME=lo on .*, which is loopback", text, re.MULTILINE)
    text, ok = doctor.network_report(["localhost", socket.gethostname()])
    assert not ok and re.search(r"^error: .*, which is loopback", text, re.MULTILINE)


WORKER = """
import dataclasses, json, os
from recsys.distributed import gather, process_group
with process_group("cpu", timeout_s=30) as ranks:
    assert gather(ranks.rank) == [0, 1]
    found = {"hosts": ranks.hosts, "here": ranks.ranks_here, "gloo": os.environ.get("GLOO_SOCKET_IFNAME")}
    found["choice"] = ranks.choice and dataclasses.asdict(ranks.choice)
    print(json.dumps(found))
"""
ALONE = """
import datetime, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=8))
dist.all_gather_object([None, None], 1)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Two hosts of a private network whose own names are loopback to them, as Debian installs them.

    The first one's default route leads to another network. `hosts(name)`: what runs a command on one of them.
    """
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("needs root, iproute2 and util-linux")
    made = subprocess.run(["ip", "netns", "add", HEAD], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "nsswitch.conf").write_text("hosts: files\n")
    commands = [
        f"netns add {OTHER}",
        f"-n {HEAD} link add eth0 type veth peer name eth0 netns {OTHER}",
        f"-n {HEAD} link add away0 type veth peer name away1",
        f"-n {HEAD} addr add 10.79.0.2/24 dev away0",
    ]
    for number, name, other in ((2, HEAD, OTHER), (3, OTHER, HEAD)):
        commands.append(f"-n {name} addr add {NET}.{number}/24 dev eth0")
        (folder / name).write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{NET}.{5 - number} {other}\n")
    commands += [f"-n {name} link set {one} up" for name in (HEAD, OTHER) for one in ("lo", "eth0")]
    commands += [f"-n {HEAD} link set {one} up" for one in ("away0", "away1")]
    commands.append(f"-n {HEAD} route add default via 10.79.0.1")
    enter = 'mount --bind $1 /etc/hosts; mount --bind $2 /etc/nsswitch.conf; hostname $3; shift 3; exec "$@"'

    def on(name: str) -> list[str]:
        private = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-ec", enter, "sh"]
        return [*private, str(folder / name), str(folder / "nsswitch.conf"), name]

    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)
        yield on
    finally:
        for name in (HEAD, OTHER):
            subprocess.run(["ip", "netns", "del", name])


def run(code: str, prefixes: list[list[str]], own: list[dict[str, str]] | None = None) -> list[tuple[str, str, int]]:
    """Output, errors and exit codes of two ranks, each with a launcher of its own; one that fails ends the other."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    head = HEAD if prefixes[0] else "localhost"
    base = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": head, "MASTER_PORT": port}
    base |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    jobs = [
        subprocess.Popen(
            [*prefix, sys.executable, "-c", code],
            env={**base, "RANK": str(rank), **(own[rank] if own else {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, prefix in enumerate(prefixes)
    ]
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s and not any(job.poll() for job in jobs) and None in [job.poll() for job in jobs]:
        time.sleep(0.1)
    time.sleep(1.0 if any(job.poll() for job in jobs) else 0)  # the other one may fail by itself, too
    for job in jobs:
        job.kill()
    return [(*job.communicate(), job.returncode) for job in jobs]


@pytest.mark.dist
def test_gloo_binds_to_the_network_between_hosts_whose_own_names_are_loopback(hosts):
    """Left alone it binds to 127.0.1.1 and the ranks never meet; the head's default route would be wrong, too."""
    alone = run(ALONE, [hosts(HEAD), hosts(OTHER)])
    assert any("connect" in err and "127.0.1.1" in err for _, err, _ in alone), (
        "the hosts do not show what this is about"
    )
    ended = run(WORKER, [hosts(HEAD), hosts(OTHER)])
    assert [code for _, _, code in ended] == [0, 0], ended
    found = [json.loads(out) for out, _, _ in ended]
    assert [one["hosts"] for one in found] == [[HEAD, OTHER]] * 2 and [one["here"] for one in found] == [1, 1]
    assert [one["gloo"] for one in found] == ["eth0", "eth0"]
    assert [one["choice"]["address"] for one in found] == [f"{NET}.2", f"{NET}.3"]
    assert [one["choice"]["why"] for one in found] == [f"route to {NET}.3", f"route to {HEAD}"]


@pytest.mark.dist
def test_a_variable_that_one_host_cannot_follow_ends_all_ranks_with_the_cause(hosts):
    ended = run(WORKER, [hosts(HEAD), hosts(OTHER)], [{}, {network.GLOO: "away0"}])
    cause = f"Rank 1 of 2: GLOO_SOCKET_IFNAME names an interface that is not on {OTHER}, or has no address"
    assert all(code != 0 and cause in err for _, err, code in ended), ended


@pytest.mark.dist
def test_loopback_is_left_to_two_launchers_on_one_host():
    ended = run(WORKER, [[], []])
    assert [code for _, _, code in ended] == [0, 0], ended
    found = [json.loads(out) for out, _, _ in ended]
    assert [(one["hosts"], one["here"], one["choice"], one["gloo"]) for one in found] == [
        ([socket.gethostname()], 2, None, None)
    ] * 2


def test_doctor_on_a_host_of_two_networks_shows_the_one_with_the_others(hosts):
    shown = {}
    for name, others in ((HEAD, [HEAD, OTHER]), (OTHER, [HEAD, OTHER]), (HEAD, [])):
        command = [*hosts(name), sys.executable, "-m", "recsys", "doctor", "--network", *others]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        shown[name, len(others)] = done.stdout
    assert f"between hosts   eth0 {NET}.2, 10 Gb/s (route to {OTHER})" in shown[HEAD, 2]
    assert f"between hosts   eth0 {NET}.3, 10 Gb/s (route to {HEAD})" in shown[OTHER, 2]
    assert f"away0 10.79.0.2, 10 Gb/s (default route, since {HEAD} is 127.0.1.1 here)" in shown[HEAD, 0]
    assert f"warning: {HEAD} is loopback here" in shown[HEAD, 2]
