# A cluster is made, four clients write for five seconds, and the sums agree.
exec su postgres -s /bin/bash <<'EOF'
set -eu
PATH=$PATH:/usr/lib/postgresql/15/bin
cd /tmp
initdb -D /tmp/db >/dev/null
pg_ctl -D /tmp/db -w -l /tmp/log -o '-c unix_socket_directories=/tmp' start >/dev/null
export PGHOST=/tmp
createdb bench
pgbench -q -i -s 2 bench 2>/dev/null
pgbench -c 4 -j 2 -T 5 bench 2>&1 | grep 'failed transactions'
psql -At bench -c 'select a = b and b = h from
    (select (select sum(abalance) from pgbench_accounts) a,
            (select sum(bbalance) from pgbench_branches) b,
            (select sum(delta) from pgbench_history) h) sums'
pg_ctl -D /tmp/db -m fast stop >/dev/null
EOF
