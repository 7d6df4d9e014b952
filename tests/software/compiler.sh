# A C program is compiled and run.
cd /tmp
echo 'int puts(const char *); int main(void) { return puts("ran") < 0; }' >a.c
gcc -O2 -o a a.c
./a
