//! Archives of any origin: ordinary, odd and hostile ones.

mod support;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::PathBuf;

use dormouse_image::{
    Compression, Digest, Expect, ImageError, Metadata, NewImage, SaveFormat, Silent,
};
use dormouse_kernel::ErrorKind;
use support::{Scratch, Tar, chain, files, header};

/// Each of these is refused with a message about the fault, and leaves nothing.
#[test]
fn hostile_tars_are_refused_and_leave_nothing() {
    let scratch = Scratch::new();
    let content = [b'x'; 100];
    let bad_sum = {
        let mut tar = Tar::default().file("f", &content).end();
        tar[0] = b'g';
        tar
    };
    let truncated = {
        let mut tar = Tar::default().file("f", &[b'x'; 5000]).end();
        tar.truncate(2000);
        tar
    };
    let huge = |size: u64| [&header(b'0', b"huge", b"", size)[..], &[0; 4096]].concat();
    let sparse_8_eb = Tar::default()
        .pax(&[
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.name", b"s"),
            ("GNU.sparse.realsize", b"9223372036854775807"),
        ])
        .entry(b'0', b"x", b"", &[b"1\n0\n4\n".as_slice(), &[0; 505], b"data"].concat())
        .end();
    let sparse_outside = Tar::default()
        .pax(&[("GNU.sparse.map", b"0,4,18446744073709551615,4"), ("GNU.sparse.size", b"8")])
        .entry(b'0', b"x", b"", b"datadata")
        .end();
    let deep = {
        let mut tar = Tar::default();
        let up = "a/".repeat(45);
        tar = tar.symlink("s0", &up);
        for i in 1..40 {
            tar = tar.symlink(&format!("s{i}"), &format!("s{}/{up}", i - 1));
        }
        tar.file("s39/f", &content).end()
    };
    let table: Vec<(&str, Vec<u8>, &str)> = vec![
        ("dot dot", Tar::default().file("a/../../etc/x", &content).end(), "out of the archive"),
        ("only dot dot", Tar::default().file("..", &content).end(), "out of the archive"),
        ("link out", Tar::default().link("a", "../../etc/shadow").end(), "out of the archive"),
        ("link to nothing", Tar::default().link("a", "/etc/shadow").end(), "no layer has it"),
        ("link to root", Tar::default().dir("d").link("a", "/").end(), "hard link to the root"),
        ("link to directory", Tar::default().dir("d").link("a", "d").end(), "to a directory"),
        ("link to itself", Tar::default().link("a", "a").end(), "no layer has it"),
        ("file as directory", Tar::default().file("a", b"1").file("a/b", b"2").end(), "directory"),
        ("root is a file", Tar::default().file("./", b"").file(".", &content).end(), "root"),
        (
            "symlink loop",
            Tar::default().symlink("a", "b").symlink("b", "a").file("a/x", b"1").end(),
            "symlinks",
        ),
        ("symlink deep", deep, "deep"),
        ("whiteout of nothing", Tar::default().file(".wh.", b"").end(), "hides no name"),
        ("whiteout of parent", Tar::default().file("a/.wh...", b"").end(), "hides no name"),
        ("checksum", bad_sum, "not a tar"),
        ("cut off", truncated, "middle of an entry"),
        ("8 EB", huge(u64::MAX >> 1), "middle of an entry"),
        ("8 GB of nothing", huge(8 << 30), "middle of an entry"),
        ("sparse 8 EB", sparse_8_eb, "16 TiB"),
        ("sparse outside", sparse_outside, "map of holes"),
        (
            "long name",
            Tar::default().pax(&[("path", &[b'a'; 256])]).file("x", b"1").end(),
            "255 bytes",
        ),
        (
            "long path",
            Tar::default().pax(&[("path", &b"a/".repeat(2048))]).file("x", b"1").end(),
            "4095",
        ),
        ("NUL", Tar::default().pax(&[("path", b"a\0b")]).file("x", b"1").end(), "NUL"),
        ("id", Tar::default().pax(&[("uid", b"4294967295")]).file("x", b"1").end(), "32 bits"),
        ("big pax", [&header(b'x', b"p", b"", 1 << 40)[..], &[0; 512]].concat(), "limit"),
        (
            "bad pax",
            Tar::default().entry(b'x', b"p", b"", b"99 a=b\n").file("x", b"1").end(),
            "records",
        ),
        (
            "big xattr",
            Tar::default().pax(&[("SCHILY.xattr.user.a", &[b'v'; 70_000])]).file("x", b"1").end(),
            "64 KiB",
        ),
        ("nothing", Vec::new(), "it is empty"),
        ("gzip of nothing", gzip(b""), "decompress"),
        ("xz", b"\xfd7zXZ\0rest".to_vec(), "xz"),
        ("text", [b"hello world, this is no archive\n".as_slice(); 40].concat(), "not a tar"),
        ("gzip of text", gzip(&[b'x'; 4096]), "not a tar"),
        (
            "broken gzip",
            gzip(&Tar::default().file("x", &[7; 9000]).end())[..60].to_vec(),
            "decompress",
        ),
    ];
    for (what, tar, words) in table {
        let error = scratch.import(&tar).map(|image| image.id).expect_err(what);
        let text = chain(&error);
        assert!(text.contains(words), "{what}: {text}");
        assert!(text.len() < 600, "{what}: {text}");
        assert_eq!(scratch.count("tmp"), 0, "{what}");
        assert_eq!(scratch.store.list().unwrap().len(), 0, "{what}");
    }
    assert!(!scratch.path("etc").exists());
}

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

/// A stream with an announced size beyond the disk is refused at its first header.
#[test]
fn stream_larger_than_the_disk_is_refused_at_once() {
    let scratch = Scratch::new();
    let import = scratch.store.begin().unwrap();
    let mut stream = [&header(b'0', b"huge", b"", u64::MAX >> 1)[..], &[0; 4096]].concat();
    stream.resize(1 << 20, 0);
    let error = import.layer(&mut &stream[..], Expect::default(), &Silent).unwrap_err();
    assert!(chain(&error).contains("no room for"), "{}", chain(&error));
    assert_eq!(error.kind(), ErrorKind::Limit);
}

/// A gigabyte of zeros after the end, in a megabyte of gzip: refused long before its end.
/// A path of two kilobytes names a thousand directories.
#[test]
fn directories_that_only_paths_name_are_bounded() {
    let scratch = Scratch::with(Metadata::Stub);
    let deep = |n: usize| format!("{n}/{}f", "a/".repeat(1000)).into_bytes();
    let tar = |paths: usize| {
        let entry = |tar: Tar, n| tar.pax(&[("path", &deep(n))]).file("f", b"");
        (0..paths).fold(Tar::default(), entry).end()
    };
    assert!(scratch.import(&tar(30)).is_ok());
    let error = scratch.import(&tar(100)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Limit, "{}", chain(&error));
    assert!(chain(&error).contains("directories that only paths"), "{}", chain(&error));
}

/// A zstd stream of this start and so many zeros behind it.
fn zeros_behind(start: &[u8], zeros: u64) -> Vec<u8> {
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.write_all(start).unwrap();
    std::io::copy(&mut std::io::repeat(0).take(zeros), &mut encoder).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn zeros_take_no_room_on_disk_and_no_unbounded_time() {
    let scratch = Scratch::with(Metadata::Stub);
    let mib = 1 << 20;
    let head = |size: u64| header(b'0', b"zeros", b"", size);
    let image = scratch.import(&zeros_behind(&head(256 * mib), 256 * mib + 1024)).unwrap();
    assert_eq!(image.layers.len(), 1);
    let blocks = |path: PathBuf| path.metadata().unwrap().blocks();
    assert_eq!(files(&scratch.path("lib/objects")).into_iter().map(blocks).sum::<u64>(), 0);

    let bomb = zeros_behind(&head(3000 * mib), 3000 * mib + 1024);
    let error = scratch.import(&bomb).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Limit, "{}", chain(&error));
    assert!(chain(&error).contains("uncompressed size"), "{}", chain(&error));
}

#[test]
fn bomb_behind_the_archive_is_refused() {
    let scratch = Scratch::new();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(&Tar::default().file("x", b"1").end()).unwrap();
    let zeros = vec![0; 1 << 20];
    (0..256).for_each(|_| encoder.write_all(&zeros).unwrap());
    let error = scratch.import(&encoder.finish().unwrap()).map(|i| i.id).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Limit, "{}", chain(&error));
}

#[test]
fn tar_comes_out_byte_for_byte_whatever_was_in_it() {
    let scratch = Scratch::new();
    let big: Vec<u8> = (0..3_000_000u32).flat_map(|n| n.to_le_bytes()).collect();
    let mut tar = Tar::default()
        .dir("./")
        .entry(b'g', b"global", b"", b"12 comment=x\n"[..].split_at(12).0)
        .file("empty", b"")
        .file("inline", &[b'i'; 64])
        .file("small", &[b's'; 65])
        .file("big", &big)
        .file("twice", b"first content, longer than sixty-four bytes, so that it is an object")
        .file("twice", b"second content, longer than sixty-four bytes, so that it is an object")
        .link("hard", "big")
        .symlink("sym", "/etc/shadow")
        .pax(&[
            ("SCHILY.xattr.trusted.overlay.redirect", b"/etc"),
            ("SCHILY.xattr.user.keep", b"a\nb=c\n"),
        ])
        .file("x", &[b'y'; 700])
        .entry(b'Z', b"unknown", b"", &[b'u'; 1000])
        .end();
    // Padding as tape drives want it.
    tar.resize(tar.len().next_multiple_of(10240), 0);
    for packed in [tar.clone(), gzip(&tar), zstd::encode_all(&tar[..], 3).unwrap()] {
        let image = scratch.import(&packed).unwrap();
        let layer = &image.layers[0];
        assert_eq!(layer.diff_id, Digest::of(&tar));
        assert_eq!(layer.tar_bytes, tar.len() as u64);
        for compression in [Compression::None, Compression::Gzip, Compression::Zstd] {
            let mut out = Vec::new();
            let blob = scratch.store.layer_blob(&layer.diff_id, compression, &mut out).unwrap();
            assert_eq!((blob.digest, blob.bytes), (Digest::of(&out), out.len() as u64));
            let plain = match compression {
                Compression::None => out,
                Compression::Gzip => {
                    let mut plain = Vec::new();
                    let mut decoder = flate2::read::GzDecoder::new(&out[..]);
                    std::io::Read::read_to_end(&mut decoder, &mut plain).unwrap();
                    plain
                }
                Compression::Zstd => zstd::decode_all(&out[..]).unwrap(),
            };
            assert!(plain == tar, "{compression:?}");
        }
    }
    assert_eq!(scratch.count("layers"), 1);
}

#[test]
fn wrong_digests_and_lengths_are_refused_before_anything_is_published() {
    let scratch = Scratch::new();
    let tar = Tar::default().file("f", &[1; 5000]).end();
    let packed = gzip(&tar);
    let import = scratch.store.begin().unwrap();
    let right = Expect {
        blob: Some(Digest::of(&packed)),
        blob_bytes: Some(packed.len() as u64),
        diff_id: Some(Digest::of(&tar)),
    };
    let other = Some(Digest::of(b"other"));
    for wrong in [
        Expect { blob: other, ..right },
        Expect { diff_id: other, ..right },
        Expect { blob_bytes: Some(packed.len() as u64 - 1), ..right },
    ] {
        let error = import.layer(&mut &packed[..], wrong, &Silent).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Limit), "{error}");
        assert_eq!(scratch.count("layers"), 0);
    }
    let layer = import.layer(&mut &packed[..], right, &Silent).unwrap();
    assert!(import.has_layer(&layer.diff_id));
    // An image may only list imported layers.
    let config = |id: Digest| {
        format!(
            r#"{{"architecture":"amd64","os":"linux","rootfs":{{"type":"layers","diff_ids":["{id}"]}}}}"#
        )
    };
    let lacking = config(Digest::of(b"other"));
    let image = |config: &str| {
        import.image(NewImage { config: config.as_bytes(), manifest: None, name: None })
    };
    assert_eq!(image(&lacking).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(image("{").unwrap_err().kind(), ErrorKind::Corrupt);
    let good = config(layer.diff_id);
    assert_eq!(image(&good).unwrap(), Digest::of(good.as_bytes()).hex());
}

/// The error of a reader that fails in the middle is returned as the cause.
#[test]
fn error_of_the_reader_is_returned() {
    struct Cut(usize);
    impl std::io::Read for Cut {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            if self.0 == 0 {
                return Err(std::io::Error::other("the cable was pulled"));
            }
            let n = self.0.min(buffer.len());
            buffer[..n].copy_from_slice(&Tar::default().file("f", &[1; 5000]).end()[..n]);
            self.0 -= n;
            Ok(n)
        }
    }
    let scratch = Scratch::new();
    let import = scratch.store.begin().unwrap();
    let error: ImageError = import.layer(&mut Cut(3000), Expect::default(), &Silent).unwrap_err();
    assert!(chain(&error).contains("the cable was pulled"), "{}", chain(&error));
}

/// 5 GiB with 8 bytes of data: neither read nor written in full, and still the right size.
#[test]
fn sparse_files_stay_sparse_in_every_format() {
    let scratch = Scratch::new();
    let size: u64 = (5 << 30) + 3;
    let dir = scratch.path("tree");
    fs::create_dir(&dir).unwrap();
    let file = fs::File::create(dir.join("sparse")).unwrap();
    file.set_len(size).unwrap();
    file.write_all_at(b"head", 8192).unwrap();
    file.write_all_at(b"tail", size - 4).unwrap();
    drop(file);
    let mut archives = vec![dir.clone()];
    for (name, format) in [
        ("old", &["--format=gnu"][..]),
        ("0.0", &["--format=pax", "--sparse-version=0.0"]),
        ("0.1", &["--format=pax", "--sparse-version=0.1"]),
        ("1.0", &["--format=pax", "--sparse-version=1.0"]),
    ] {
        let path = scratch.path(name);
        let done = std::process::Command::new("tar")
            .args(["-S", "-cf"])
            .arg(&path)
            .args(format)
            .arg("-C")
            .arg(&dir)
            .arg("sparse")
            .status()
            .unwrap();
        assert!(done.success());
        assert!(fs::metadata(&path).unwrap().len() < 100_000, "{name}");
        archives.push(path);
    }
    for archive in archives {
        let image = scratch.import_path(&archive).unwrap();
        assert_eq!(image.size_bytes, size, "{}", archive.display());
    }
    let objects = support::files(&scratch.path("lib/objects"));
    assert_eq!(objects.len(), 1, "all five are one object");
    let meta = fs::metadata(&objects[0]).unwrap();
    assert_eq!(meta.len(), size);
    assert!(meta.blocks() * 512 < 100_000);
    assert_eq!(meta.permissions().mode() & 0o777, 0o444);
    let object = fs::File::open(&objects[0]).unwrap();
    let mut bytes = [0; 8];
    object.read_exact_at(&mut bytes, 8190).unwrap();
    assert_eq!(&bytes, b"\0\0head\0\0");
    object.read_exact_at(&mut bytes[..4], size - 4).unwrap();
    assert_eq!(&bytes[..4], b"tail");
}

/// A directory becomes an image, the image an archive, and each way to read that archive gives the
/// same image again.
#[test]
fn saved_images_come_back_with_the_same_id() {
    let scratch = Scratch::new();
    let tree = scratch.path("tree");
    fs::create_dir_all(tree.join("etc")).unwrap();
    fs::write(tree.join("etc/big"), [5; 100_000]).unwrap();
    fs::write(tree.join("small"), "s").unwrap();
    fs::hard_link(tree.join("etc/big"), tree.join("link")).unwrap();
    let name = "localhost:5000/a/b:1".parse().unwrap();
    let id = scratch.store.import(&tree, Some(&name), &Silent).unwrap();
    let image = scratch.store.find("localhost:5000/a/b:1").unwrap();
    assert_eq!(image.id, id);
    let mut saved = Vec::new();
    let images = std::slice::from_ref(&image);
    scratch.store.save(images, SaveFormat::OciArchive, &mut saved, &Silent).unwrap();
    // As a directory, and as docker's archives were before OCI.
    let layout = scratch.path("layout");
    tar::Archive::new(&saved[..]).unpack(&layout).unwrap();
    assert!(layout.join("oci-layout").exists());
    let old = scratch.path("old");
    tar::Archive::new(&saved[..]).unpack(&old).unwrap();
    fs::remove_file(old.join("oci-layout")).unwrap();
    let mut docker = tar::Builder::new(Vec::new());
    docker.append_dir_all("", &old).unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = scratch.path(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let ways = [
        write("saved.tar", &saved),
        write("saved.tar.gz", &gzip(&saved)),
        write("saved.tar.zst", &zstd::encode_all(&saved[..], 1).unwrap()),
        write("docker.tar", &docker.into_inner().unwrap()),
        layout.clone(),
    ];
    for way in &ways {
        let other = Scratch::new();
        let again = other.store.import(way, None, &Silent);
        let again = again.unwrap_or_else(|e| panic!("{}: {}", way.display(), chain(&e)));
        assert_eq!(again, id, "{}", way.display());
        let again = other.store.find("localhost:5000/a/b:1").unwrap();
        assert_eq!((&again.id, &again.layers), (&id, &image.layers), "{}", way.display());
        assert!(other.store.verify().unwrap().is_empty());
    }
    // One byte of any blob changed: refused in each case.
    for blob in support::files(&layout.join("blobs")) {
        let good = fs::read(&blob).unwrap();
        let mut bad = good.clone();
        let middle = bad.len() / 2;
        bad[middle] ^= 1;
        fs::write(&blob, &bad).unwrap();
        let other = Scratch::new();
        let error = other.store.import(&layout, None, &Silent).unwrap_err();
        assert!(chain(&error).contains("digest"), "{}: {}", blob.display(), chain(&error));
        assert_eq!(other.store.list().unwrap().len(), 0);
        fs::write(&blob, &good).unwrap();
    }
}

#[test]
fn second_image_costs_its_difference() {
    let scratch = Scratch::new();
    let tar = |n: u32, extra: &[u8]| {
        let mut tar = Tar::default();
        for i in 0..n {
            tar = tar.file(&format!("f{i}"), format!("{i:0100}").as_bytes());
        }
        tar.file("extra", extra).end()
    };
    scratch.import(&tar(50, &[1; 100])).unwrap();
    assert_eq!(scratch.count("objects"), 51);
    scratch.import(&tar(50, &[2; 100])).unwrap();
    assert_eq!(scratch.count("objects"), 52);
}

#[test]
fn names_follow_the_last_tag() {
    let scratch = Scratch::new();
    let one = scratch.import(&Tar::default().file("a", b"1").end()).unwrap();
    let two = scratch.import(&Tar::default().file("a", b"2").end()).unwrap();
    let name = "web".parse().unwrap();
    scratch.store.tag(&one, &name).unwrap();
    assert_eq!(scratch.store.find("web").unwrap().id, one.id);
    assert_eq!(scratch.store.find("web:latest").unwrap().names, std::slice::from_ref(&name));
    scratch.store.tag(&two, &name).unwrap();
    assert_eq!(scratch.store.find("web").unwrap().id, two.id);
    assert!(scratch.store.find(&one.id[..12]).unwrap().names.is_empty());
    assert_eq!(scratch.store.find(&format!("sha256:{}", two.id)).unwrap().id, two.id);
    assert!(scratch.store.untag(&name).unwrap());
    assert!(!scratch.store.untag(&name).unwrap());
    for missing in ["web", "nothing", "", "sha256:", &"0".repeat(64), "../images"] {
        assert_eq!(scratch.store.find(missing).unwrap_err().kind(), ErrorKind::NotFound);
    }
    assert_eq!(scratch.store.list().unwrap().len(), 2);
}
