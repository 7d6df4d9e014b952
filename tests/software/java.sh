# Four threads add up a million numbers.
cd /tmp
cat >Sum.java <<'EOF'
public class Sum {
    public static void main(String[] args) throws Exception {
        long[] parts = new long[4];
        Thread[] threads = new Thread[4];
        for (int t = 0; t < 4; t++) {
            int n = t;
            threads[t] = new Thread(() -> {
                for (int i = n; i < 1000000; i += 4) parts[n] += i;
            });
            threads[t].start();
        }
        for (Thread thread : threads) thread.join();
        System.out.println(parts[0] + parts[1] + parts[2] + parts[3]);
    }
}
EOF
javac Sum.java
java -cp . Sum
