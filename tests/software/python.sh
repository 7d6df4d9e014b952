# A virtual environment, pip, and a package from an index on the container's own loopback.
mkdir -p /tmp/index/dozy
cd /tmp/index
python3 - <<'EOF'
import zipfile
with zipfile.ZipFile("dozy/dozy-1.0-py3-none-any.whl", "w") as wheel:
    wheel.writestr("dozy/__init__.py", "def nap(): return 42\n")
    wheel.writestr("dozy-1.0.dist-info/METADATA",
                   "Metadata-Version: 2.1\nName: dozy\nVersion: 1.0\n")
    wheel.writestr("dozy-1.0.dist-info/WHEEL",
                   "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\n"
                   "Tag: py3-none-any\n")
    wheel.writestr("dozy-1.0.dist-info/RECORD", "")
EOF
echo '<a href="dozy-1.0-py3-none-any.whl">dozy-1.0-py3-none-any.whl</a>' >dozy/index.html
python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 &
python3 -m venv /tmp/venv
/tmp/venv/bin/pip install -q --disable-pip-version-check \
    --index-url http://127.0.0.1:8000/ dozy 2>/tmp/err || cat /tmp/err
/tmp/venv/bin/python -c 'import dozy; print(dozy.nap())'
