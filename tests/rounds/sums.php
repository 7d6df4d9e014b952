<?php
// A server of sums for php-fpm (see programs/client.py). Sums are in the sessions, which are files.
[, $client, $n, $count] = explode('/', $_SERVER['REQUEST_URI']);
session_id("client$client");
session_start();
$_SESSION['sum'] = ($_SESSION['sum'] ?? 0) + (int)$n;
$body = implode(',', range(0, $count - 1)) . " {$_SESSION['sum']}";
session_write_close();
header('Content-Length: ' . strlen($body));
echo $body;
