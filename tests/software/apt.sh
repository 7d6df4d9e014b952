# apt installs and removes a package from a repository of one package, made here. The install covers
# apt, dpkg and a maintainer script that creates a user.
export DEBIAN_FRONTEND=noninteractive
mkdir -p /tmp/dozy/DEBIAN /tmp/dozy/usr/bin /repo
cat >/tmp/dozy/DEBIAN/control <<'EOF'
Package: dozy
Version: 1.0
Architecture: all
Maintainer: nobody
Description: naps
EOF
cat >/tmp/dozy/DEBIAN/postinst <<'EOF'
#!/bin/sh
useradd -r dozy && touch /var/lib/dozy && chown dozy /var/lib/dozy
EOF
printf '#!/bin/sh\necho dozing\n' >/tmp/dozy/usr/bin/dozy
chmod 755 /tmp/dozy/DEBIAN/postinst /tmp/dozy/usr/bin/dozy
dpkg-deb -b /tmp/dozy /repo/dozy.deb >/dev/null
cd /repo
{
    dpkg-deb -f dozy.deb
    echo "Filename: ./dozy.deb"
    echo "Size: $(stat -c %s dozy.deb)"
    echo "SHA256: $(sha256sum dozy.deb | cut -d ' ' -f 1)"
} >Packages
rm -rf /etc/apt/sources.list /etc/apt/sources.list.d
echo 'deb [trusted=yes] file:/repo ./' >/etc/apt/sources.list
apt-get update -qq
apt-get install -y -qq dozy >/tmp/log 2>&1 || cat /tmp/log
dozy
stat -c %U /var/lib/dozy
apt-get remove -y -qq dozy >/dev/null 2>&1
hash -r
command -v dozy || echo gone
