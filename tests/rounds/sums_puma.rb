# A server of sums for puma (see programs/client.py), with four threads.
sums = Hash.new(0)
lock = Mutex.new
bind 'tcp://0.0.0.0:80'
threads 1, 4
persistent_timeout 3600
app do |environment|
  _, client, n, count = environment['PATH_INFO'].split('/')
  total = lock.synchronize { sums[client] += n.to_i }
  [200, { 'Content-Type' => 'text/plain' }, ["#{(0...count.to_i).to_a.join(',')} #{total}"]]
end
