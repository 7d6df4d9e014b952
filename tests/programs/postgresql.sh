# A server with a database of pgbench.
mkdir -p /run/postgresql && chown postgres /run/postgresql
exec su postgres -s /bin/bash <<'EOF'
set -eu
PATH=$PATH:/usr/lib/postgresql/15/bin
initdb -D /tmp/db >/dev/null
echo "host all all all trust" >>/tmp/db/pg_hba.conf
exec postgres -D /tmp/db -c listen_addresses='*'
EOF
