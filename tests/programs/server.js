// See client.py.
const sums = {};
const server = require('http').createServer((request, response) => {
  const [, who, n, count] = request.url.split('/');
  sums[who] = (sums[who] || 0) + Number(n);
  response.end([...Array(Number(count)).keys()].join() + ' ' + sums[who]);
});
server.keepAliveTimeout = 0;
server.listen(80, '0.0.0.0');
