#!/usr/bin/env bash
# Run a command beside a PostgreSQL primary and its synchronous standby: scripts/cluster.sh COMMAND [ARGUMENT]...
# Debian's package is installed if it is missing (as root). PostgreSQL refuses root, so the servers run as its user.
# The command finds a folder in SPECQ_CLUSTER: `ports` (of both servers), their data in `primary` and `standby`, sockets.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "test-cluster: $*" >&2; }

newest() { ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -1; }

bin=$(newest)
if [ -z "$bin" ]; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "this needs PostgreSQL; install it, then run it again: sudo apt-get install postgresql"
    exit 1
  fi
  say "installing postgresql"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql >/dev/null
  bin=$(newest)
fi
[ "$(id -u)" = 0 ] && as=(runuser -u postgres --) || as=()

folder=$(mktemp -d)
command=
finish() {
  [ -z "$command" ] || kill "$command" 2>/dev/null || true
  for one in standby primary; do
    "${as[@]}" "$bin/pg_ctl" stop --silent -m immediate -D "$folder/$one" 2>/dev/null || true
  done
  rm -rf "$folder"
}
trap finish EXIT
trap 'exit 143' INT TERM HUP
chmod 755 "$folder"
[ "$(id -u)" != 0 ] || chown postgres "$folder"

free_ports='import socket
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*[one.getsockname()[1] for one in sockets])'
read -r first second < <(python3 -c "$free_ports")
cat >"$folder/rules" <<END
local all all trust
local replication all trust
host all with_password 127.0.0.1/32 scram-sha-256
host all all 127.0.0.1/32 trust
END

(
  cd "$folder"
  "${as[@]}" "$bin/initdb" --pgdata=primary --username=postgres --auth=trust --encoding=UTF8 --locale=C >/dev/null
  "${as[@]}" tee -a primary/postgresql.conf >/dev/null <<END
listen_addresses = '127.0.0.1'
unix_socket_directories = '$folder'
hba_file = '$folder/rules'
port = $first
synchronous_standby_names = '*'
wal_receiver_status_interval = 1
wal_retrieve_retry_interval = 100ms
max_connections = 50
shared_buffers = 64MB
END
  as_server() { "${as[@]}" "$bin/pg_ctl" start --silent --wait -D "$folder/$1" -l "$folder/$1.log"; }
  as_server primary
  "${as[@]}" env PGOPTIONS="-c synchronous_commit=local" "$bin/pg_basebackup" --checkpoint=fast --write-recovery-conf \
    --dbname="host=$folder port=$first user=postgres" --pgdata=standby
  echo "port = $second" | "${as[@]}" tee -a standby/postgresql.conf >/dev/null
  as_server standby
) >&2
echo "$first $second" >"$folder/ports"

SPECQ_CLUSTER=$folder "$@" <&0 &
command=$!
status=0
wait "$command" || status=$?
command=
exit "$status"
