# Values are written and read back, and three kinds of load answer.
redis-server --save '' --daemonize yes >/dev/null
until redis-cli ping >/dev/null 2>&1; do sleep 0.1; done
for i in $(seq 500); do echo "set key$i value$i"; done | redis-cli >/dev/null
redis-cli get key321
rows=$(redis-benchmark --csv -n 20000 -c 20 -t set,get,lpush | grep -cE '"(SET|GET|LPUSH)"')
echo "$rows benchmarks"
redis-cli shutdown nosave
