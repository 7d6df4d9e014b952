//! A relay of checkpoints over kernels and CPUs: `cargo xtask guest --relay` runs every leg in a
//! boot of its own, in order. Legs pass archives through the directory `DORMOUSE_RELAY`.

use std::fs;
use std::path::PathBuf;

use dormouse_testkit::{Host, image};

use super::wait_for_line;

/// Workloads for the whole way: started under one kernel, continued under the next, finished at
/// home.
const RUNNERS: [&str; 11] = [
    "memory",
    "thread",
    "signal",
    "file",
    "pipe",
    "event",
    "socketpair",
    "rights",
    "restart",
    "clock",
    "vdso",
];
/// Started under the newer kernel, so that the features they found are missing at home.
const LATE: [&str; 2] = ["vdso", "thread"];

/// The path of a file that one leg leaves for another.
fn baton(name: &str) -> PathBuf {
    let dir =
        std::env::var_os("DORMOUSE_RELAY").expect("cargo xtask guest --relay sets DORMOUSE_RELAY");
    PathBuf::from(dir).join(name)
}

fn text(name: &str) -> String {
    baton(name).display().to_string()
}

/// A host with the image of the first leg.
fn host() -> Host {
    let host = Host::new();
    host.dm(&["import", "-q", &text("image.tar")]).ok();
    host
}

fn start(host: &Host, name: &str, program: &str, rounds: usize) {
    let (program, rounds) = (format!("/bin/{program}"), format!("ROUNDS={rounds}"));
    let words = ["run", "-d", "--name", name, "--net", "none", "--env", &rounds, "workloads"];
    host.dm(&[&words[..], &[&program]].concat()).ok();
    wait_for_line(host, name, "ready 0");
}

fn hand_on(host: &Host, name: &str) {
    let archive = text(&format!("{name}.archive"));
    let _ = fs::remove_file(&archive); // ignored: the file of an earlier leg, if any
    host.dm(&["checkpoint", "--archive", "--to", &archive, name]).ok();
}

/// Imports and restores a container, and ends its round.
fn take(host: &Host, name: &str, round: usize) {
    let archive = text(&format!("{name}.archive"));
    assert_eq!(host.dm(&["checkpoint", "import", &archive]).ok(), name);
    host.dm(&["restore", name]).ok();
    let out = host.dm(&["exec", name, "touch", &format!("/go-{round}")]);
    // The container may end before the command that ended its round.
    assert!([0, 137].contains(&out.status), "{name}: {out}");
}

fn finish(host: &Host, name: &str) {
    wait_for_line(host, name, "ok");
    assert_eq!(host.dm(&["wait", name]).ok(), "0", "{name}");
}

/// The restore is refused with the name of the CPU feature, and the container is unchanged.
fn refused(host: &Host, name: &str, feature: &str) {
    let archive = text(&format!("{name}.archive"));
    assert_eq!(host.dm(&["checkpoint", "import", &archive]).ok(), name);
    let out = host.dm(&["restore", name]);
    assert!(out.status != 0 && out.stderr.contains("this CPU lacks "), "{out}");
    let named = |word: &str| word == feature;
    assert!(out.stderr.split([' ', ',']).any(named), "{feature}: {out}");
    assert_eq!(host.state_of(name), "created");
}

#[test]
#[ignore = "a leg of the relay: cargo xtask guest --relay"]
fn leg_0_on_the_machine_itself() {
    let host = Host::new();
    host.import(&image::workloads(), "workloads");
    host.dm(&["save", "-q", "-o", &text("image.tar"), "workloads"]).ok();
    start(&host, "outsider", "memory", 1);
    hand_on(&host, "outsider");
    fs::copy("/proc/cpuinfo", baton("cpuinfo")).expect("write the file");
}

#[test]
#[ignore = "a leg of the relay: cargo xtask guest --relay"]
fn leg_1_sets_out() {
    let host = host();
    for name in RUNNERS {
        start(&host, name, name, 2);
        hand_on(&host, name);
    }
    // Emulation has none of these features, whatever the machine has.
    let outside = fs::read_to_string(baton("cpuinfo")).expect("the file of leg 0");
    let has = |feature: &&str| outside.split_ascii_whitespace().any(|word| word == *feature);
    match ["avx512f", "xsavec", "fsrm"].iter().find(|feature| has(feature)) {
        Some(feature) => refused(&host, "outsider", feature),
        None => println!("this machine's CPU has nothing that the guest's has not: not shown"),
    }
}

#[test]
#[ignore = "a leg of the relay: cargo xtask guest --relay"]
fn leg_2_goes_on_under_a_newer_kernel() {
    let host = host();
    for name in RUNNERS {
        take(&host, name, 0);
    }
    for name in RUNNERS {
        wait_for_line(&host, name, "ready 1");
        hand_on(&host, name);
    }
    // The imported files are now an image below the containers, and an archive contains no image.
    let image = |name: &str| {
        let container = host.inspect(name);
        container["config"]["root"]["image"]["id"].as_str().expect("an id").to_owned()
    };
    let images = RUNNERS.map(image);
    let mut words = vec!["save", "-q", "-o"];
    let onwards = text("onwards.tar");
    words.push(&onwards);
    words.extend(images.iter().map(String::as_str));
    host.dm(&words).ok();
    for program in LATE {
        let name = format!("late-{program}");
        start(&host, &name, program, 1);
        hand_on(&host, &name);
    }
}

#[test]
#[ignore = "a leg of the relay: cargo xtask guest --relay"]
fn leg_3_comes_home() {
    let host = host();
    host.dm(&["import", "-q", &text("onwards.tar")]).ok();
    for name in RUNNERS {
        take(&host, name, 1);
        finish(&host, name);
    }
    for program in LATE {
        let name = format!("late-{program}");
        take(&host, &name, 0);
        finish(&host, &name);
    }
}

#[test]
#[ignore = "a leg of the relay: cargo xtask guest --relay"]
fn leg_4_is_refused_by_a_smaller_cpu() {
    refused(&host(), "late-vdso", "avx2");
}
