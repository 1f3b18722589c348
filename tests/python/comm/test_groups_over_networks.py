"""Two machines of two ranks each: network name spaces joined by a link."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

# Runs as root of a user name space of its own: its network is the first machine, a
# sleeping process holds the second. Each end of the link is held to 50 Mbit/s, where
# this kernel can: most have tbf, few of those in small virtual machines netem's delay.
MACHINES = """
set -e
unshare -n sleep 250 &
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
limit="root tbf rate 50mbit burst 32kb latency 400ms"
tc qdisc add dev here $limit && $in_other tc qdisc add dev there $limit \
    && touch "$3/limited" || true
export WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.77.0.1 MASTER_PORT=29511
ranks=
for rank in 0 1 2 3; do
    at=; device=here
    if [ $rank -ge 2 ]; then at=$in_other; device=there; fi
    RANK=$rank GLOO_SOCKET_IFNAME=$device $at "$1" "$2" > "$3/told$rank" &
    ranks="$ranks $!"
done
for rank in $ranks; do wait $rank; done
"""


def can_make_machines() -> bool:
    if not all(shutil.which(name) for name in ("unshare", "nsenter", "ip", "tc")):
        return False
    trial = "ip link add here type veth peer name there"
    return subprocess.run(["unshare", "-rn", "sh", "-c", trial]).returncode == 0


def test_ranks_in_two_networks_make_one_group(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if not can_make_machines():
        pytest.skip("needs unshare, ip and the right to make network name spaces")
    program = ROOT / "tests/programs/comm/networks.py"
    command = ["unshare", "-rn", "bash", "-c", MACHINES, "machines"]
    done = subprocess.run(
        [*command, sys.executable, str(program), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        *told, seconds = json.loads((tmp_path / f"told{rank}").read_text())
        assert told == ["hierarchical", rank, 4, True, [10.0, 11.0, 12.0, 13.0]]
        # Half of 2 MB crosses from each of a machine's ranks: 16 Mbit, 0.32 seconds.
        assert seconds > 0.25 or not (tmp_path / "limited").exists()
