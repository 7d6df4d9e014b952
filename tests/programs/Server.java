// See client.py.
import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Executors;
import java.util.stream.Collectors;
import java.util.stream.IntStream;

public class Server {
    public static void main(String[] args) throws Exception {
        ConcurrentHashMap<String, Long> sums = new ConcurrentHashMap<>();
        HttpServer server = HttpServer.create(new InetSocketAddress("0.0.0.0", 80), 0);
        server.setExecutor(Executors.newFixedThreadPool(4));
        server.createContext("/", exchange -> {
            String[] words = exchange.getRequestURI().getPath().split("/");
            long sum = sums.merge(words[1], Long.parseLong(words[2]), Long::sum);
            IntStream numbers = IntStream.range(0, Integer.parseInt(words[3]));
            String all = numbers.mapToObj(String::valueOf).collect(Collectors.joining(","));
            byte[] body = (all + " " + sum).getBytes();
            exchange.sendResponseHeaders(200, body.length);
            exchange.getResponseBody().write(body);
            exchange.close();
        });
        server.start();
    }
}
