#!/usr/bin/env bash
# Runs a command as two ranks on two "hosts" of this machine, joined by a link of limited rate.
#
#   benchmarks/two_hosts.sh RATE COMMAND...        RATE as tc takes it: 1gbit, 500mbit, ...
#
# Each rank runs in a network namespace of its own; a veth pair joins the two and a token bucket limits each
# direction to RATE, which costs no CPU. The command finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and
# GLOO_SOCKET_IFNAME in its environment, and the rate in RULER_LINK. When one rank fails the other is ended. What was
# made is removed at the end, however it comes. Needs root and iproute2.
set -euo pipefail

usage="usage: $0 RATE COMMAND..."
(($# >= 2)) || { echo "$usage" >&2; exit 2; }
((EUID == 0)) || { echo "$0: needs root, to make network namespaces" >&2; exit 2; }
for tool in ip tc; do
    command -v "$tool" >/dev/null || { echo "$0: needs $tool (Debian: apt-get install iproute2)" >&2; exit 2; }
done

rate=$1
shift
# Names hold this process's id, so that runs beside each other do not meet; addresses are the namespaces' own.
hosts=("shardc-$$-0" "shardc-$$-1")
links=("sh$$a" "sh$$b")
addresses=(10.77.0.1 10.77.0.2)

inside() { # the processes of a namespace; none once it is gone
    ip netns pids "$1" 2>/dev/null || true
}

clean() {
    trap - EXIT
    trap '' INT TERM
    local host pid signal
    for signal in TERM KILL; do
        for host in "${hosts[@]}"; do
            for pid in $(inside "$host"); do kill -s "$signal" "$pid" 2>/dev/null || true; done
        done
        # A rank that was asked to stop gets five seconds to end its own workers.
        for _ in {1..50}; do
            [[ -n $(for host in "${hosts[@]}"; do inside "$host"; done) ]] || break
            sleep 0.1
        done
    done
    # The devices go with their namespaces, unless they were not moved there yet.
    ip link delete "${links[0]}" 2>/dev/null || true
    for host in "${hosts[@]}"; do ip netns delete "$host" 2>/dev/null || true; done
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

for host in "${hosts[@]}"; do ip netns add "$host"; done
ip link add "${links[0]}" type veth peer name "${links[1]}"
for rank in 0 1; do
    host=${hosts[rank]} link=${links[rank]}
    ip link set "$link" netns "$host"
    ip -n "$host" address add "${addresses[rank]}/24" dev "$link"
    ip -n "$host" link set lo up
    ip -n "$host" link set "$link" up
    tc -n "$host" qdisc add dev "$link" root tbf rate "$rate" burst 256kb latency 50ms
done

for rank in 0 1; do
    ip netns exec "${hosts[rank]}" env \
        RANK="$rank" WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR="${addresses[0]}" MASTER_PORT=29500 \
        GLOO_SOCKET_IFNAME="${links[rank]}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" RULER_LINK="$rate" "$@" &
done
wait -n
wait -n
