# Four compilers at a time build a program of sixty files, repeatedly, with the same result.
set -eu
mkdir /tmp/work
cd /tmp/work
for n in $(seq 60); do
    { echo "int f$n(int x) { int sum = 0;"
      for k in $(seq 60); do echo "for (int i = 0; i < x; i++) sum += i * $k ^ $n;"; done
      echo "return sum; }"; } >f$n.c
done
{ for n in $(seq 60); do echo "int f$n(int);"; done
  echo 'int printf(const char *, ...); int main(void) { int sum = 0;'
  for n in $(seq 60); do echo "sum += f$n($n);"; done
  echo 'return printf("%d\n", sum) < 0; }'; } >main.c
printf 'all: $(patsubst %%.c,%%.o,$(wildcard *.c))\n\tgcc -o all $^\n%%.o: %%.c\n\tgcc -O2 -c $<\n' >Makefile
make -j4 >/dev/null
./all >/tmp/first
echo begun
while [ ! -e /tmp/stop ]; do
    rm -f *.o all
    make -j4 >/dev/null
    ./all | cmp - /tmp/first
done
echo all was right
