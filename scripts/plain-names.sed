# Mangled names (the v0 scheme of Rust, RFC 2603) without the hashes of crates, and without the offsets of references,
# which depend on their lengths.
s/Cs[0-9A-Za-z]*_/C_/g
s/B[0-9A-Za-z]*_/B_/g
