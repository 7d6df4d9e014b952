# Four connections change a table; none fails, and the sums agree in the end.
set -eu
sql() { mariadb -h a -u bench -N "$@" bench; }
until sql -e "select 1" >/dev/null 2>&1; do sleep 0.2; done
sql <<'EOF'
create table account (id int primary key, balance int, filler char(200)) engine=innodb;
create table history (client int, number int, primary key (client, number)) engine=innodb;
insert into account select seq, 0, repeat(char(65 + seq % 26), 200) from seq_1_to_100000;
EOF
work() {
	n=0
	while [ ! -e /tmp/stop ]; do
		n=$((n + 1))
		echo "begin;
			update account set balance = balance + 1 where id = 1 + (($1 * 7919 + $n * 10007) % 100000);
			insert into history values ($1, $n);
			commit;
			select 'done';
			select count(*) - 1000 from account where id between 1 + ($n * 37 % 99) * 1000
				and ($n * 37 % 99 + 1) * 1000 and filler = repeat(char(65 + id % 26), 200);"
		sleep 0.02
	done | sql --unbuffered >/tmp/done.$1
}
for client in 1 2 3 4; do
	work $client &
	clients="${clients-} $!"
done
echo begun
for client in $clients; do wait $client; done
cat /tmp/done.? | sort | uniq -c
made=$(cat /tmp/done.? | grep -c done)
sql -e "select case when a = h and h = $made then 'all was right' end from
	(select (select sum(balance) from account) a, (select count(*) from history) h) sums"
[ "$(cat /tmp/done.? | grep -cvE '^(done|0)$')" = 0 ]
