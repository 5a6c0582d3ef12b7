#!/usr/bin/env bash
# A real Slurm cluster of several nodes on this one machine, to try launching with.
#
#   cluster.sh start | stop | status | env
#
# Needs root and (Debian 12): apt-get install --no-install-recommends slurm-wlm munge iproute2
# Each node is a network and UTS namespace with its own address and host name. Everything lives under $SLURM_LAB: the
# configuration, munge's key and socket, spool, logs, and a pid file for each daemon; /etc is not written to.
#
#   SLURM_LAB        folder (default /tmp/slurm-lab); short, for it holds a socket. Labs in several folders do not meet
#   SLURM_LAB_NODES  number of nodes (default 2)
set -euo pipefail

LAB=${SLURM_LAB:-/tmp/slurm-lab}
NODES=${SLURM_LAB_NODES:-2}
PREFIX=tn
NUMBER=$(($(echo -n "$LAB" | cksum | cut -d' ' -f1) % 200))
NET=10.77.$NUMBER
BRIDGE=lab${NUMBER}br
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export SLURM_CONF=$LAB/slurm.conf

log() { echo "slurm-lab: $*" >&2; }

write_files() {
    local i
    sed -e "s|@LAB@|$LAB|g" -e "s|@HOST@|$(hostname -s)|g" -e "s|@ADDRESS@|$NET.1|g" \
        -e "s|@PORT@|$((17000 + NUMBER))|g" "$HERE/slurm.conf.in" >"$SLURM_CONF"
    {
        for i in $(seq "$NODES"); do
            echo "NodeName=$PREFIX$i NodeHostname=$PREFIX$i NodeAddr=$NET.$((i + 1)) Port=16818 CPUs=2 RealMemory=4096 State=UNKNOWN"
        done
        echo "PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO"
    } >>"$SLURM_CONF"
    # Slurm 22.05 needs no word for "no control groups" and knows none; newer ones fail without it.
    case "$(slurmd -V)" in
    *" 22."*) : >"$LAB/cgroup.conf" ;;
    *) echo "CgroupPlugin=disabled" >"$LAB/cgroup.conf" ;;
    esac
    # What a node takes for /etc/hosts; nobody asks DNS there, whose server would be out of reach.
    {
        echo "127.0.0.1 localhost"
        echo "$NET.1 $(hostname -s)"
        for i in $(seq "$NODES"); do echo "$NET.$((i + 1)) $PREFIX$i"; done
    } >"$LAB/node-hosts"
    sed -e 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf >"$LAB/node-nsswitch"
    grep -q '^hosts:' "$LAB/node-nsswitch" || echo "hosts: files" >>"$LAB/node-nsswitch"
}

net_up() {
    local i n
    ip link add "$BRIDGE" type bridge
    ip addr add "$NET.1/24" dev "$BRIDGE"
    ip link set "$BRIDGE" up
    for i in $(seq "$NODES"); do
        n=lab${NUMBER}n$i
        ip netns add "$n"
        ip link add "$n" type veth peer name eth0 netns "$n"
        ip link set "$n" master "$BRIDGE" up
        ip -n "$n" link set lo up
        ip -n "$n" addr add "$NET.$((i + 1))/24" dev eth0
        ip -n "$n" link set eth0 up
        ip -n "$n" route add default via "$NET.1"
    done
}

net_down() {
    local n
    for n in $(ip netns list 2>/dev/null | awk '{print $1}' | grep -E "^lab${NUMBER}n[0-9]+$" || true); do
        ip netns del "$n" || true
        ip link del "$n" 2>/dev/null || true # the namespace lives on while a process is in it
    done
    ip link del "$BRIDGE" 2>/dev/null || true
}

# spawn NAME COMMAND...: in the background, with a pid file and its output in a log
spawn() {
    local name=$1
    shift
    setsid "$@" >"$LAB/log/$name.out" 2>&1 </dev/null &
    echo $! >"$LAB/pid/$name"
}

start() {
    local i n f deadline
    for f in "$LAB"/pid/*; do
        if [ -f "$f" ] && kill -0 "$(cat "$f")" 2>/dev/null; then
            log "already started under $LAB (stop it first)"
            exit 1
        fi
    done
    net_down # of a cluster that was not stopped
    trap stop EXIT
    rm -rf "$LAB/pid"
    mkdir -p "$LAB"/{pid,log,state,spool,munge}
    chmod 755 "$LAB" "$LAB/munge"
    [ -f "$LAB/munge/key" ] || (umask 077 && head -c 128 /dev/urandom >"$LAB/munge/key")
    write_files
    net_up

    spawn munged munged --foreground --key-file="$LAB/munge/key" --socket="$LAB/munge/socket" \
        --pid-file="$LAB/munge/pid" --log-file="$LAB/munge/log" --seed-file="$LAB/munge/seed"
    for _ in $(seq 50); do [ -S "$LAB/munge/socket" ] && break; sleep 0.1; done
    spawn slurmctld slurmctld -D -c -f "$SLURM_CONF"
    for i in $(seq "$NODES"); do
        n=$PREFIX$i
        # Not "ip netns exec": that mounts another /sys, without the control groups that slurmd 22.05 looks for.
        spawn "slurmd-$n" nsenter --net="/run/netns/lab${NUMBER}n$i" unshare --uts --mount sh -ec '
            mount --bind "$2/node-hosts" /etc/hosts
            mount --bind "$2/node-nsswitch" /etc/nsswitch.conf
            hostname "$1"
            exec slurmd -D -N "$1" -f "$2/slurm.conf"' sh "$n" "$LAB"
    done
    deadline=$((SECONDS + 30))
    until [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l)" -eq "$NODES" ]; do
        if [ $SECONDS -ge $deadline ]; then
            log "nodes are not idle after 30 s"
            sinfo -N -l >&2 || true
            tail -n 20 "$LAB"/log/*.out >&2 || true
            exit 1
        fi
        sleep 0.2
    done
    trap - EXIT
    log "up: $(sinfo -h -o '%N %T')"
}

stop() {
    local f pid
    # Jobs first, so that no step outlives its slurmd.
    if [ -f "$LAB/pid/slurmctld" ]; then
        timeout 5 scancel --full --user="$(id -un)" 2>/dev/null || true
        for _ in $(seq 25); do
            [ -z "$(timeout 2 squeue -h -t pending,running,completing 2>/dev/null)" ] && break
            sleep 0.2
        done
    fi
    # slurmctld before slurmd, for whose answers it would wait.
    for f in "$LAB"/pid/slurmctld "$LAB"/pid/slurmd-* "$LAB"/pid/munged; do
        [ -f "$f" ] && kill -TERM "$(cat "$f")" 2>/dev/null || true
    done
    for f in "$LAB"/pid/*; do
        [ -f "$f" ] || continue
        pid=$(cat "$f")
        for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        if kill -KILL "$pid" 2>/dev/null; then log "$(basename "$f") ($pid) had to be killed"; fi
        rm -f "$f"
    done
    # A rank whose torchrun was killed outright has left the tree of processes that Slurm follows here.
    for f in $(grep -lsz "^SLURM_CONF=$SLURM_CONF$" /proc/[0-9]*/environ || true); do
        if grep -qsz "^SLURM_JOB_ID=" "$f"; then
            pid=${f//[!0-9]/}
            if kill -KILL "$pid" 2>/dev/null; then log "left-over process $pid killed"; fi
        fi
    done
    net_down
    log "stopped"
}

case "${1:-}" in
start) start ;;
stop) stop ;;
status)
    for f in "$LAB"/pid/*; do
        [ -f "$f" ] && echo "$(basename "$f") $(cat "$f") $(kill -0 "$(cat "$f")" 2>/dev/null && echo alive || echo dead)"
    done
    sinfo -N -l
    ;;
env)
    echo "export SLURM_CONF=$SLURM_CONF"
    case "$(slurmd -V)" in *" 22."*) echo "export PATH=$HERE/shim:\$PATH" ;; esac
    ;;
*)
    echo "usage: $0 start|stop|status|env" >&2
    exit 2
    ;;
esac
