# A server of sums for starman (see programs/client.py). Each worker serves one connection; the sums are in files.
use Fcntl ':flock';
sub {
    my (undef, $client, $n, $count) = split '/', shift->{PATH_INFO};
    open my $file, '+>>', "/tmp/sum-$client" or die $!;
    flock $file, LOCK_EX;
    seek $file, 0, 0;
    my $sum = (<$file> // 0) + $n;
    truncate $file, 0;
    print $file $sum;
    close $file;
    my $body = join(',', 0 .. $count - 1) . " $sum";
    [200, ['Content-Type' => 'text/plain', 'Content-Length' => length $body], [$body]];
};
