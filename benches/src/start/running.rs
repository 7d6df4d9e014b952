//! `true` in a running container.

use std::fs;
use std::process::Command;

use anyhow::Result;
use dormouse_benches::{Arm, Bench, installed, interleave, ok, promise, tabulate, without_v2};

/// The container in which programs are executed.
const NAME: &str = "stays";

pub(crate) fn measure(
    bench: &Bench,
    others: &[(&str, Bench)],
    rounds: usize,
    load: &str,
) -> Result<()> {
    // Spares are for starts.
    let with_runners = others.iter().filter(|(name, _)| *name == crate::RUNNERS);
    let own: Vec<(&str, &Bench)> = std::iter::once(("dormouse", bench))
        .chain(with_runners.map(|(name, bench)| (*name, bench)))
        .collect();
    let mut arms = Vec::new();
    for (name, bench) in &own {
        ok(bench.dormouse().args(["run", "-d", "--name", NAME, "bench", "sleep", "100000"]))?;
        let (root, exe) = (bench.path("root"), bench.dormouse().get_program().to_owned());
        arms.push(Arm::new(name, move |_| {
            let mut command = Command::new(&exe);
            command.arg("--root").arg(&root).args(["exec", NAME, "true"]);
            command
        }));
    }
    for runtime in ["crun", "runc"] {
        if installed(runtime) {
            arms.push(peer(bench, runtime)?);
        }
    }
    let times = interleave(&arms, rounds)?;
    let title = format!("`true` in a running container, {load}");
    let more = serde_json::json!({ "verb": "exec", "load": load });
    let of = tabulate("start", &title, &arms, &times, &more);
    for (name, _) in &own {
        if let (Some(ours), Some(crun)) = (of(name), of("crun")) {
            promise(&format!("exec, {name}, of crun"), ours / crun, 0.4);
        }
    }
    for arm in &arms[own.len()..] {
        let mut end = Command::new(&arm.name);
        end.arg("--root").arg(bench.path(Bench::STATE).join(&arm.name));
        end.args(["delete", "--force", NAME]);
        let mut end = move || ok(&mut end);
        if arm.hide_v2 {
            without_v2(end)?
        } else {
            end()?
        };
    }
    for (_, bench) in own {
        ok(bench.dormouse().args(["rm", "--force", NAME]))?;
    }
    Ok(())
}

/// Starts a container of another runtime. Returns the arm that executes programs in it.
fn peer(bench: &Bench, runtime: &'static str) -> Result<Arm> {
    let bundle = bench.bundle(&format!("bundle-{runtime}-exec"), false)?;
    let path = bundle.join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
    config["process"]["args"] = serde_json::json!(["/bin/sleep", "100000"]);
    fs::write(&path, serde_json::to_vec(&config)?)?;
    let state = bench.path(Bench::STATE).join(runtime);
    let mut run = Command::new(runtime);
    run.arg("--root").arg(&state).args(["run", "--detach", "--bundle"]).arg(bundle).arg(NAME);
    run.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null());
    run.stderr(std::process::Stdio::null());
    let mut start = move || {
        let status = run.status()?;
        anyhow::ensure!(status.success(), "{runtime} starts no container: {status}");
        Ok(())
    };
    let hides = runtime == "crun";
    if hides {
        without_v2(start)?
    } else {
        start()?
    };
    let mut arm = Arm::new(runtime, move |_| {
        let mut command = Command::new(runtime);
        command.arg("--root").arg(&state).args(["exec", NAME, "/bin/true"]);
        command
    });
    arm.hide_v2 = hides;
    Ok(arm)
}
