# Starts one of the programs of tests/rounds.rs in the foreground: servers.sh NAME. Each program has the
# configuration of its package of Debian, with the changes below: it listens on all addresses, its clients need
# no password, and it does not end connections that are idle for some minutes.
set -eu

# Lines that systemd, or the init script of the package, would execute before the program.
directory() { mkdir -p "$1" && chown "$2" "$1"; }
as() { user=$1 && shift && exec setpriv --reuid "$user" --regid "$user" --init-groups "$@"; }

# Servers of pages, and proxies.

nginx() {
    cat >/etc/nginx/conf.d/rounds.conf <<'END'
server {
    listen 80;
    listen [::]:80;
    server_name a;
    root /var/www/html;
    keepalive_timeout 1h;
    location = /status { stub_status; }
}
END
    exec nginx -g 'daemon off;'
}

apache2() {
    cat >/etc/apache2/conf-enabled/rounds.conf <<'END'
ServerName a
KeepAliveTimeout 3600
MaxKeepAliveRequests 0
ExtendedStatus On
<Location /status>
    SetHandler server-status
    Require all granted
</Location>
END
    exec apache2ctl -D FOREGROUND
}

haproxy() {
    python3 /rounds/origin.py
    directory /run/haproxy haproxy
    sed -i '/^\tlog/d; /^\tdaemon/d' /etc/haproxy/haproxy.cfg
    cat >>/etc/haproxy/haproxy.cfg <<'END'
frontend all
    bind :80
    timeout client 1h
    timeout http-keep-alive 1h
    stick-table type ip size 1k expire 1h store http_req_cnt
    http-request track-sc0 src
    http-response set-header X-Count %[sc_http_req_cnt(0)]
    default_backend origin
backend origin
    timeout server 1h
    server origin 127.0.0.1:8080
END
    exec haproxy -W -f /etc/haproxy/haproxy.cfg
}

varnish() {
    python3 /rounds/origin.py
    cat >>/etc/varnish/default.vcl <<'END'
sub vcl_deliver {
    set resp.http.X-Count = obj.hits;
}
END
    exec varnishd -F -a :80 -p timeout_idle=3600 -f /etc/varnish/default.vcl -s malloc,64m
}

squid() {
    python3 /rounds/origin.py
    cat >/etc/squid/conf.d/rounds.conf <<'END'
http_access allow all
client_idle_pconn_timeout 1 hour
shutdown_lifetime 0
END
    exec squid --foreground -sYC
}

# Databases, caches and queues.

redis() {
    as redis redis-server /etc/redis/redis.conf --daemonize no --bind 0.0.0.0 --protected-mode no --appendonly yes
}

memcached() { exec memcached -u memcache -m 64 -l 0.0.0.0; }

beanstalkd() {
    directory /tmp/log beanstalkd
    as beanstalkd beanstalkd -l 0.0.0.0 -b /tmp/log
}

postgresql() {
    echo 'host all all all trust' >>/etc/postgresql/15/main/pg_hba.conf
    echo "listen_addresses = '*'" >/etc/postgresql/15/main/conf.d/rounds.conf
    exec pg_ctlcluster 15 main start --foreground
}

mariadb() {
    printf '%s;\n' "create database test" "create user 'user'" "grant all on *.* to 'user'" >/tmp/start.sql
    directory /run/mysqld mysql
    exec mariadbd --user=mysql --bind-address=0.0.0.0 --init-file=/tmp/start.sql
}

etcd() {
    directory /var/lib/etcd/default etcd
    export ETCD_NAME=a ETCD_DATA_DIR=/var/lib/etcd/default
    as etcd etcd --listen-client-urls http://0.0.0.0:2379 --advertise-client-urls http://a:2379
}

influxdb() { as influxdb influxd -config /etc/influxdb/influxdb.conf; }

slapd() {
    cat >/tmp/slapd.conf <<'END'
include /etc/ldap/schema/core.schema
modulepath /usr/lib/ldap
moduleload back_mdb
database mdb
suffix dc=a
rootdn cn=admin,dc=a
rootpw password
directory /tmp/ldap
END
    directory /tmp/ldap openldap
    exec slapd -d 0 -u openldap -g openldap -f /tmp/slapd.conf -h ldap://0.0.0.0
}

nats() { exec nats-server -a 0.0.0.0; }

mosquitto() {
    printf 'listener 1883\nallow_anonymous true\n' >/etc/mosquitto/conf.d/rounds.conf
    directory /run/mosquitto mosquitto
    directory /var/log/mosquitto mosquitto
    exec mosquitto -c /etc/mosquitto/mosquitto.conf
}

rabbitmq() {
    echo '[rabbitmq_stomp].' >/etc/rabbitmq/enabled_plugins
    echo 'loopback_users = none' >/etc/rabbitmq/rabbitmq.conf
    export HOME=/var/lib/rabbitmq RABBITMQ_NODENAME=rabbit@localhost
    exec rabbitmq-server
}

# Runtimes of languages, each with a server of sums (see programs/client.py).

openjdk() { exec java /programs/Server.java; }
node() { exec node /programs/server.js; }
python() { exec python3 /programs/server.py; }
asyncio() { exec python3 /rounds/sums_asyncio.py; }
gunicorn() { exec gunicorn --chdir /rounds --bind 0.0.0.0:80 --threads 4 --keep-alive 3600 sums_wsgi:serve; }
ruby() { exec puma --config /rounds/sums_puma.rb; }
perl() { exec starman --listen :80 --workers 4 --keepalive-timeout 3600 /rounds/sums.psgi; }

php() {
    cat >/etc/nginx/sites-enabled/default <<'END'
server {
    listen 80;
    keepalive_timeout 1h;
    location / {
        include fastcgi_params;
        fastcgi_param SCRIPT_FILENAME /rounds/sums.php;
        fastcgi_pass unix:/run/php/php8.2-fpm.sock;
    }
}
END
    mkdir -p /run/php
    { until [ -S /run/php/php8.2-fpm.sock ]; do sleep 0.1; done; command nginx; } &
    exec php-fpm8.2 --nodaemonize
}

rseq() {
    gcc -O2 -Wall -pthread -o /tmp/rseq /rounds/rseq.c -l:libtcmalloc.so.4
    exec /tmp/rseq
}

# Programs in Go.

caddy() {
    python3 /rounds/origin.py
    exec caddy run --config /rounds/caddy.json
}

registry() {
    sed -i '/^auth:/,/path:/d' /etc/docker/registry/config.yml
    as docker-registry docker-registry serve /etc/docker/registry/config.yml
}

prometheus() {
    cat >/etc/prometheus/prometheus.yml <<'END'
global:
  scrape_interval: 1s
scrape_configs:
  - job_name: itself
    static_configs:
      - targets: ['localhost:9090']
END
    cd /var/lib/prometheus
    as prometheus prometheus --config.file=/etc/prometheus/prometheus.yml --web.read-timeout=1h
}

alertmanager() {
    cd /var/lib/prometheus
    as prometheus prometheus-alertmanager --config.file=/etc/prometheus/alertmanager.yml --cluster.listen-address=
}

# Graphs of the host.

netdata() {
    # Its monitoring of itself keeps a file of procfs for each thread open, and that of IPC limits
    # /proc/sys/kernel/sem, which a checkpoint refuses by name.
    cat >/etc/netdata/netdata.conf <<'END'
[global]
    run as user = netdata
[web]
    bind to = *
    disconnect idle clients after seconds = 0
[plugins]
    netdata monitoring = no
    netdata monitoring extended = no
[plugin:proc]
    ipc = no
END
    exec netdata -D
}

# Other services of a network.

sshd() {
    mkdir -p /run/sshd
    passwd --quiet --delete root
    exec /usr/sbin/sshd -D -o PermitRootLogin=yes -o PermitEmptyPasswords=yes -o UsePAM=no
}

dnsmasq() {
    address=$(getent ahostsv4 a | awk 'NR == 1 { print $1 }')
    exec dnsmasq -k -R --bind-interfaces --listen-address="$address" --local-ttl=600 --address=/rounds/192.0.2.77
}

unbound() {
    rm /etc/unbound/unbound.conf.d/root-auto-trust-anchor-file.conf
    cat >/etc/unbound/unbound.conf.d/rounds.conf <<'END'
server:
    interface: 0.0.0.0
    access-control: 0.0.0.0/0 allow
    num-threads: 2
    tcp-idle-timeout: 3600000
    local-zone: "rounds." static
    local-data: "one.rounds. A 192.0.2.77"
END
    exec unbound -d -p
}

rsync() {
    mkdir -p /srv/files
    cat >/etc/rsyncd.conf <<'END'
uid = root
use chroot = yes
[files]
path = /srv/files
read only = no
END
    exec rsync --daemon --no-detach
}

git() {
    command git init --quiet --bare --initial-branch=main /srv/kept.git
    exec git daemon --reuseaddr --export-all --enable=receive-pack --base-path=/srv --timeout=3600
}

dovecot() {
    useradd --create-home user
    cat >/etc/dovecot/conf.d/99-rounds.conf <<'END'
protocols = imap
log_path = /dev/stderr
disable_plaintext_auth = no
ssl = no
mail_location = maildir:~/Maildir
passdb {
    driver = static
    args = nopassword=y
}
userdb {
    driver = passwd
}
END
    sed -i '/^!include/s/^/#/' /etc/dovecot/conf.d/10-auth.conf
    exec dovecot -F
}

cron() {
    # Each job counts, and connects to the client. A minute of cron lasts a second.
    cat >/etc/cron.d/rounds <<'END'
SHELL=/bin/bash
* * * * * root n=$(($(cat /tmp/count) + 1)) && echo $n >/tmp/count && echo $n >/dev/tcp/c/7000
END
    echo 0 >/tmp/count
    rm -f /etc/crontab /etc/cron.daily/*
    exec faketime --exclude-monotonic -f '+0 x60' cron -f
}

systemd() {
    cp /programs/sums.service /programs/sums.socket /etc/systemd/system/
    cat >/etc/systemd/system/rounds.target <<'END'
[Unit]
Requires=basic.target dbus.service systemd-logind.service sums.socket
After=basic.target
END
    exec /sbin/init --unit=rounds.target
}

# Programs in a terminal.

tmux() { export SHELL=/bin/bash && exec tmux -f /dev/null new-session 'exec bash --norc'; }
screen() { export SHELL=/bin/bash && exec screen -c /dev/null bash --norc; }
vim() { exec vim /root/text; }
emacs() { exec emacs -nw -Q /root/text; }

"$1"
