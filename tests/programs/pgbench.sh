# Four clients write on four connections for some seconds. None fails, and the final sums agree.
set -eu
export PGHOST=a PGUSER=postgres
until createdb bench 2>/dev/null; do sleep 0.2; done
pgbench -q -i -s 2 bench 2>/dev/null
echo begun
pgbench -c 4 -j 2 -T "$1" bench | grep 'failed transactions: 0 '
# A new connection is refused while the server is in an archive, as by any stopped server.
until [ -e /tmp/stop ]; do sleep 0.1; done
psql -At bench -c "select case when a = b and b = h then 'all was right' end from
    (select (select sum(abalance) from pgbench_accounts) a,
            (select sum(bbalance) from pgbench_branches) b,
            (select sum(delta) from pgbench_history) h) sums"
