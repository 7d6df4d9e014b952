//! Encrypted archives: a container is made with a key only, contents are unreadable without one,
//! and a modified archive is refused before it creates anything.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use dormouse_testkit::{Host, dormouse};

use super::{carry_image, flip, go_on, host, rounds, start, wait_for_line};

/// Key pairs made for these tests: the public and the secret key of each.
const ONE: [&str; 2] = [
    "age1zjj63yzncepuavl5jcs9w8qymtkrwhc83pzde7s45e5p6tv323ws676lwy",
    "AGE-SECRET-KEY-1JPZY2QWYKW90MGS5R8HDDD0JZS6HX0SZUJVXZC433UWK3P7E5N0Q97LX33",
];
const OTHER: [&str; 2] = [
    "age1q3u323ckwyjvnnc5estnw37ajg7w6w3kkqvme4r0fn5j75l5gdgszxn4tk",
    "AGE-SECRET-KEY-1ZEV9M92HFCFLJZNMA9YYKYZKJ3SN6WK45VZMAZSHJXXMU0NGH6AS7NUJF2",
];

const HEAD: &[u8] = b"age-encryption.org/v1\n";
/// Bytes of an encrypted chunk.
const CHUNK_BYTES: usize = (64 << 10) + 16;
const NONCE_BYTES: usize = 16;

/// Writes a file that only its owner can read.
fn file(host: &Host, name: &str, text: &str) -> String {
    let path = host.dir().join(name);
    fs::write(&path, text).expect("write the file");
    fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("our child");
    path.display().to_string()
}

fn place(host: &Host, name: &str) -> String {
    host.dir().join(name).display().to_string()
}

/// Returns whether the bytes contain the workload's heap, no part of which is in a file.
fn has_memory(bytes: &[u8]) -> bool {
    bytes.windows(64).any(|w| w == [b'h'; 64])
}

#[track_caller]
fn refused(host: &Host, words: &[&str], why: &str) {
    let out = host.dm(words);
    assert!(out.status != 0 && out.stderr.contains(why), "'{why}': {out}");
    assert_eq!(out.stderr.lines().count(), 1, "{out}");
    assert!(!out.stderr.contains("1JPZY") && !out.stderr.contains("1ZEV9"), "{out}");
}

/// Runs the rest of the workload after its container was carried to another host.
fn finish(host: &Host, name: &str) {
    for round in 0..rounds() {
        if round > 0 {
            wait_for_line(host, name, &format!("ready {round}"));
        }
        go_on(host, name, round);
    }
    wait_for_line(host, name, "ok");
}

#[test]
fn encrypted_archive_needs_a_recipient_key() {
    let (here, there) = (host(), Host::new());
    carry_image(&here, &there);
    start(&here, "memory", &["--net", "none"]);
    wait_for_line(&here, "memory", "ready 0");

    // A failed encryption saves nothing, and the container continues.
    let sealed = place(&here, "sealed");
    let save = ["checkpoint", "--archive", "--to", &sealed];
    let empty = file(&here, "empty", "# nobody\n");
    for (more, why) in [
        (["--recipient", "age1nobody"], "age1 and 58"),
        (["--recipient", ONE[1]], "is not valid"),
        (["--recipients-file", &empty], "no recipient in"),
        (["--recipients-file", "/none"], "/none"),
        (["--passphrase-file", &empty[..1]], "cannot read a passphrase"),
    ] {
        refused(&here, &[&save[..], &more, &["memory"]].concat(), why);
    }
    refused(&here, &["checkpoint", "-r", ONE[0], "memory"], "give --archive");
    assert_eq!(here.state_of("memory"), "running");
    assert!(!Path::new(&sealed).exists());

    let plain = place(&here, "plain");
    here.dm(&["checkpoint", "--leave-running", "--archive", "--to", &plain, "memory"]).ok();
    assert!(has_memory(&fs::read(&plain).expect("the file was written")));
    let list = file(&here, "list", &format!("# recipients\n\n{}\n", OTHER[0]));
    let recipients = ["--recipient", ONE[0], "--recipients-file", &list];
    here.dm(&[&save[..], &recipients, &["memory"]].concat()).ok();
    assert_eq!(here.state_of("memory"), "stopped");
    let bytes = fs::read(&sealed).expect("the file was written");
    assert!(bytes.starts_with(HEAD) && !has_memory(&bytes));
    for word in ["DORMARCH", "workloads", "/bin/memory", "hostname"] {
        assert!(!bytes.windows(word.len()).any(|w| w == word.as_bytes()), "{word}");
    }

    let import = ["checkpoint", "import"];
    let invalid = file(&there, "invalid", &format!("{}\n", OTHER[1].replace('Z', "Y")));
    refused(&there, &[&import[..], &[&sealed]].concat(), "is encrypted: give --identity FILE");
    let keys = ["--identity", &invalid, &sealed];
    refused(&there, &[&import[..], &keys].concat(), "non-identity data on line 1");
    let key = file(&there, "key", &format!("# created: today\n{}\n", OTHER[1]));
    fs::set_permissions(&key, Permissions::from_mode(0o640)).expect("our child");
    let keys = ["--identity", &key, &sealed];
    refused(&there, &[&import[..], &keys].concat(), "chmod 600");
    fs::set_permissions(&key, Permissions::from_mode(0o600)).expect("our child");
    assert_eq!(there.dm(&["ps", "-a", "--quiet"]).ok(), "");
    assert_eq!(there.dm(&[&import[..], &keys].concat()).ok(), "memory");
    // A superfluous key does no harm.
    let keys = ["--name", "plain", "--identity", &key, &plain];
    assert_eq!(there.dm(&[&import[..], &keys].concat()).ok(), "plain");
    there.dm(&["restore", "memory"]).ok();
    finish(&there, "memory");
}

#[test]
fn changed_encrypted_archive_is_refused_and_leaves_nothing() {
    let host = host();
    start(&host, "memory", &["--net", "none"]);
    wait_for_line(&host, "memory", "ready 0");
    host.dm(&["checkpoint", "memory"]).ok();
    let archive = place(&host, "a");
    host.dm(&["checkpoint", "export", "-o", &archive, "-r", ONE[0], "memory"]).ok();
    let (key, other) = (file(&host, "key", ONE[1]), file(&host, "other", OTHER[1]));
    let import = |key: &str| {
        ["checkpoint", "import", "--name", "b", "--identity", key, &archive].map(String::from)
    };
    let import = |key: &str, why: &str| {
        let words = import(key);
        refused(&host, &words.each_ref().map(String::as_str), why);
    };
    import(&other, "no identity that was given opens it");

    let path = Path::new(&archive);
    let good = fs::read(path).expect("the file was written");
    let find =
        |what: &[u8]| good.windows(what.len()).position(|w| w == what).expect("the file exists");
    let mac = find(b"\n--- ") + 5;
    let chunks = mac + 44 + NONCE_BYTES;
    let last = chunks + (good.len() - chunks) / CHUNK_BYTES * CHUNK_BYTES;
    let changed = "it is not what was encrypted";
    // The order of recipients is arbitrary, and some are dummies. A flipped letter must remain a
    // letter.
    let share = find(b"\n-> X25519 ") + 11;
    let is_letter = |at: &usize| (good[*at] ^ 4).is_ascii_alphanumeric();
    let recipient = (share..share + 40).find(is_letter).expect("one of forty");
    for (at, why) in [
        (3, "not an archive"),
        (HEAD.len() - 2, "not 1"),
        (recipient, "no identity that was given opens it"),
        (mac + 3, "damaged"),
        (chunks - 1, changed),
        (chunks, changed),
        (chunks + CHUNK_BYTES - 1, changed),
        (chunks + CHUNK_BYTES, changed),
        (good.len() / 2, changed),
        (last, changed),
        (good.len() - 1, changed),
    ] {
        flip(path, at as u64);
        import(&key, why);
        flip(path, at as u64);
    }
    let write = |parts: &[&[u8]]| fs::write(path, parts.concat()).expect("write the file");
    for (length, why) in [
        (10, "damaged"),
        (HEAD.len() + 30, "it is cut off"),
        (chunks - 1, "it is cut off"),
        // Cut between two chunks, every remaining chunk has a valid tag.
        (chunks, "it is cut off"),
        (chunks + CHUNK_BYTES, "it is cut off"),
        (last, "it is cut off"),
        (last - 1, changed),
        (good.len() - 1, changed),
    ] {
        write(&[&good[..length]]);
        import(&key, why);
    }
    write(&[&good, b"x"]);
    import(&key, changed);
    write(&[&good, &good]);
    import(&key, changed);
    let (first, second) = (chunks + CHUNK_BYTES, chunks + 2 * CHUNK_BYTES);
    write(&[&good[..chunks], &good[first..second], &good[chunks..first], &good[second..]]);
    import(&key, changed);
    write(&[&good[..chunks], &good[first..]]);
    import(&key, changed);
    // An endless head, and a key derivation that takes years.
    write(&[HEAD, &b"-> X25519 a\n\n".repeat(100_000)]);
    import(&key, "its head is too long");
    let work =
        b"-> scrypt bBjlhJVYZeE4aqUdmtRHfw 40\nZV/AhotwSGqaPCU43cepl4WYUouAa17a3xpu4G2yi5k\n";
    write(&[HEAD, work, &good[mac - 4..]]);
    import(&key, "give --passphrase-file FILE");
    let phrase = file(&host, "phrase", "some");
    let words = ["checkpoint", "import", "--passphrase-file", &phrase, &archive];
    refused(&host, &words, "2^40 units of work");
    assert_eq!(host.dm(&["ps", "-a", "--quiet"]).ok().lines().count(), 1);
    let left = host.root().join("lib/containers");
    assert_eq!(fs::read_dir(&left).expect("the file exists").count(), 1, "{}", left.display());

    // Through a pipe, compressed, with an additional key.
    let command = format!("{} --root {}", dormouse().display(), host.root().display());
    host.sh(&format!(
        "{command} checkpoint export --compress -r {} memory | \
         {command} checkpoint import --start --name b --identity {other} --identity {key} -",
        ONE[0]
    ))
    .ok();
    finish(&host, "b");
}

#[test]
fn archive_is_encrypted_with_passphrase() {
    let host = host();
    start(&host, "memory", &["--net", "none"]);
    wait_for_line(&host, "memory", "ready 0");
    host.dm(&["checkpoint", "memory"]).ok();
    let archive = place(&host, "a");
    let (right, wrong) = (file(&host, "right", "right\nmore\n"), file(&host, "wrong", "righ\n"));
    let export = ["checkpoint", "export", "-o", &archive, "--passphrase-file", &right];
    let out = host.dm(&[&export[..], &["-r", ONE[0], "memory"]].concat());
    assert!(out.status != 0 && out.stderr.contains("cannot be used with"), "{out}");
    host.dm(&[&export[..], &["memory"]].concat()).ok();
    assert!(!has_memory(&fs::read(&archive).expect("the file was written")));
    let import = ["checkpoint", "import", "--name", "b"];
    let key = file(&host, "key", ONE[1]);
    let words = [&import[..], &["--identity", &key, &archive]].concat();
    refused(&host, &words, "give --passphrase-file FILE");
    let words = [&import[..], &["--passphrase-file", &wrong, &archive]].concat();
    refused(&host, &words, "another passphrase");
    // From a pipe as well, as from a program that stores the passphrase.
    let words = [&import[..], &["--passphrase-file", "/dev/stdin", &archive]].concat();
    assert_eq!(host.dm_with_input(b"right\n", &words).ok(), "b");
    host.dm(&["restore", "b"]).ok();
    finish(&host, "b");
}
