#!/bin/sh
# A whole Flower federation on this machine: SuperLink and SuperNodes on loopback, TLS and node keys, offline.
#   ./federation.sh              everything: keys, SuperLink, NODES SuperNodes, one run, its bytes; then stop
#   ./federation.sh keys         certificates and one key pair per node
#   ./federation.sh superlink    the SuperLink, in the foreground
#   ./federation.sh register     tell the SuperLink the public keys of the nodes
#   ./federation.sh node I       SuperNode I, in the foreground
#   ./federation.sh run [K=V …]  one run, with these values of [tool.flwr.app.config]
#   ./federation.sh counters     Flower's own account of the runs, as JSON
# Set by the environment: NODES (5), PORT (9500), WORK (./federation), APP (this folder), and LINK: node I reaches the
# SuperLink through port LINK + I, where a proxy listens, instead of PORT (tools/throttled_link.py).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
nodes=${NODES:-5} port=${PORT:-9500} work=${WORK:-$here/federation} app=${APP:-$here}
mkdir -p "$work"
work=$(cd "$work" && pwd)
export FLWR_HOME="$work/flwr" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 \
    PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1

keys() {
    cd "$work"
    for tool in openssl ssh-keygen; do
        command -v "$tool" > /dev/null || {
            echo "federation.sh: $tool is missing; on Debian: apt-get install openssl openssh-client" >&2
            exit 1
        }
    done
    i=0
    while [ "$i" -lt "$nodes" ]; do
        [ -f "node-$i" ] || ssh-keygen -q -t ecdsa -b 384 -N "" -C "node $i" -f "node-$i"
        i=$((i + 1))
    done
    [ -f ca.crt ] && return
    openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj "/CN=gluefl example CA" \
        -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign" \
        -keyout ca.key -out ca.new 2>/dev/null
    openssl req -newkey rsa:2048 -nodes -subj "/CN=localhost" -keyout server.key -out server.csr 2>/dev/null
    printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\n' > server.ext
    openssl x509 -req -in server.csr -CA ca.new -CAkey ca.key -CAcreateserial -days 30 \
        -extfile server.ext -out server.crt 2>/dev/null
    chmod 600 ca.key server.key
    mkdir -p "$FLWR_HOME"
    printf '[superlink]\ndefault = "loopback"\n\n[superlink.loopback]\naddress = "127.0.0.1:%s"\nroot-certificates = "%s/ca.crt"\n' \
        "$port" "$work" > "$FLWR_HOME/config.toml"
    mv ca.new ca.crt
}

superlink() {
    cd "$work"
    exec flower-superlink --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key \
        --enable-supernode-auth --database superlink.db --disable-runtime-dependency-installation \
        --host 127.0.0.1 --port "$port"
}

register() {
    i=0
    while [ "$i" -lt "$nodes" ]; do
        flwr supernode register "$work/node-$i.pub" loopback
        i=$((i + 1))
    done
}

node() {
    cd "$work"
    superlink_port=$port
    [ -z "${LINK:-}" ] || superlink_port=$((LINK + $1))
    exec flower-supernode --root-certificates ca.crt --superlink "127.0.0.1:$superlink_port" \
        --auth-supernode-private-key "node-$1" --host 127.0.0.1 --port $((port + 1 + $1)) \
        --node-config "partition-id=$1 num-partitions=$nodes gluefl-dir=\"$work/device-$1\""
}

run() {
    settings="num-nodes=$nodes"
    for setting in "$@"; do settings="$settings $setting"; done
    flwr run "$app" loopback --stream --run-config "$settings"
}

all() {
    keys
    rm -f "$work"/superlink.db*  # it knows the keys of the nodes, which are registered anew
    pids=""
    trap 'kill $pids 2>/dev/null || true; wait' EXIT INT TERM
    "$here/federation.sh" superlink > "$work/superlink.log" 2>&1 & pids="$!"
    until flwr list loopback > /dev/null 2>&1; do
        kill -0 "$pids" || { cat "$work/superlink.log" >&2; exit 1; }
        sleep 1
    done
    register
    i=0
    while [ "$i" -lt "$nodes" ]; do
        "$here/federation.sh" node "$i" > "$work/node-$i.log" 2>&1 & pids="$pids $!"
        i=$((i + 1))
    done
    run "$@"
    flwr list loopback --format json
}

command=${1:-all}
[ $# -gt 0 ] && shift
case "$command" in
    keys|superlink|register|node|run|all) "$command" "$@" ;;
    counters) exec flwr list loopback --format json ;;
    *) sed -n '2,11p' "$0" | sed 's/^# \{0,1\}//'; exit 2 ;;
esac
