"""Two machines of two ranks each: network name spaces joined by a link."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import PYTHONPATH, ROOT

# Runs as root of a user name space of its own: its network is the first machine, a
# sleeping process holds the second. Each end of the link is held to a rate, where this
# kernel can: most have tbf, few of those in small virtual machines netem's delay.
# $1: the folder; $2: megabits a second; then a rank's command.
MACHINES = """
set -e
folder=$1; rate=$2; shift 2
unshare -n sleep 550 &
other=$!
trap 'kill $(jobs -p)' EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do
    sleep 0.05
done
ip link add here type veth peer name there
ip link set there netns $other
ip addr add 10.77.0.1/24 dev here
ip link set here up
ip link set lo up
in_other="nsenter -t $other -n"
$in_other ip addr add 10.77.0.2/24 dev there
$in_other ip link set there up
$in_other ip link set lo up
limit="root tbf rate ${rate}mbit burst 32kb latency 400ms"
tc qdisc add dev here $limit && $in_other tc qdisc add dev there $limit \
    && touch "$folder/limited" || true
export WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.77.0.1 MASTER_PORT=29511
ranks=
for rank in 0 1 2 3; do
    at=; device=here
    if [ $rank -ge 2 ]; then at=$in_other; device=there; fi
    RANK=$rank LOCAL_RANK=$((rank % 2)) GLOO_SOCKET_IFNAME=$device $at "$@" \
        > "$folder/output$rank" 2>&1 &
    ranks="$ranks $!"
done
for rank in $ranks; do wait $rank; done
"""


def can_be_made() -> bool:
    """Whether this user may make networks, and has what makes them."""
    if not all(shutil.which(name) for name in ("unshare", "nsenter", "ip", "tc")):
        return False
    trial = "ip link add here type veth peer name there"
    command = ["unshare", "-rn", "sh", "-c", trial]
    return subprocess.run(command, capture_output=True).returncode == 0


def need() -> None:
    """Skip the test where networks cannot be made."""
    if not can_be_made():
        pytest.skip("needs unshare, ip and the right to make network name spaces")


def run(
    folder: Path, rate_mbit: int, command: list[str], seconds: int = 280
) -> list[str]:
    """Run a command as the four ranks; what each has written. Raises AssertionError
    with all of it where one fails, or all are ended after so many seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [sys.executable, *command]
    done = subprocess.run(
        ["timeout", str(seconds), "unshare", "-rn", "bash", "-c", MACHINES, "machines",
         str(folder), str(rate_mbit), *ranks],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    outputs = [(folder / f"output{rank}").read_text() for rank in range(4)]
    assert done.returncode == 0, "\n".join([done.stderr, *outputs])
    return outputs


def told(folder: Path, program: str, rate_mbit: int, **options: Any) -> list[Any]:
    """What each rank of a module of tests/programs told, as ranks.run has it."""
    command = ["-m", f"programs.{program}", str(folder), json.dumps(options)]
    run(folder, rate_mbit, command)
    return [json.loads((folder / f"told{rank}.json").read_text()) for rank in range(4)]


def is_limited(folder: Path) -> bool:
    """Whether the link was held to its rate."""
    return (folder / "limited").exists()


def sent_bytes() -> int:
    """Of a rank: the bytes that its machine has sent over the link so far."""
    device = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == device:
            return int(counts.split()[8])
    raise AssertionError(f"no device {device}")
