// See client.py.
const sums = {};
const server = require('http').createServer((request, response) => {
  const [, client, n, count] = request.url.split('/');
  sums[client] = (sums[client] || 0) + Number(n);
  response.end([...Array(Number(count)).keys()].join() + ' ' + sums[client]);
});
server.keepAliveTimeout = 0;
server.listen(80, '0.0.0.0');
