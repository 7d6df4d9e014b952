# A server whose tables are larger than its memory for them, so that it reads and writes them all the time.
set -eu
mariadb-install-db --user=mysql --datadir=/tmp/db --auth-root-authentication-method=normal \
	--skip-test-db >/dev/null
cat >/tmp/begin.sql <<'EOF'
create user bench@'%';
grant all on bench.* to bench@'%';
create database bench;
EOF
mkdir -p /run/mysqld && chown mysql /run/mysqld
exec mariadbd --user=mysql --datadir=/tmp/db --bind-address=0.0.0.0 --init-file=/tmp/begin.sql \
	--innodb-use-native-aio=ON --innodb-flush-method=O_DIRECT --innodb-buffer-pool-size=8M \
	--skip-name-resolve
