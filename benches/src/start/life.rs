//! `create`, `start` and the removal, each by a command of its own.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use dormouse_benches::{Arm, Bench, installed, interleave, promise, tabulate};

/// Our verbs, with `$0` for the program, `$1` for the root and `$2` for the name.
const OURS: &str = "\"$0\" --root \"$1\" create --name \"$2\" bench true && \
                    \"$0\" --root \"$1\" start \"$2\" && exec \"$0\" --root \"$1\" rm --force \"$2\"";

/// The verbs of an OCI runtime; `$3` is its bundle.
const OCI: &str = "\"$0\" --root \"$1\" create -b \"$3\" \"$2\" && \
                   \"$0\" --root \"$1\" start \"$2\" && exec \"$0\" --root \"$1\" delete --force \"$2\"";

/// Measures the engine, also with other settings, `dormouse-oci`, and the peers. `load` is that of the host.
pub(crate) fn measure(
    bench: &Bench,
    others: &[(&str, Bench)],
    rounds: usize,
    load: &str,
) -> Result<()> {
    let mut arms = vec![ours("dormouse", bench)];
    arms.extend(others.iter().map(|(name, bench)| ours(name, bench)));
    let oci = Path::new(bench.dormouse().get_program()).with_file_name("dormouse-oci");
    arms.push(of_bundle(bench, "dormouse-oci", &oci)?);
    for runtime in ["crun", "runc"] {
        if installed(runtime) {
            arms.push(of_bundle(bench, runtime, Path::new(runtime))?);
        }
    }
    let times = interleave(&arms, rounds)?;
    let title = format!("create, start and removal by three commands, {load}");
    let more = serde_json::json!({ "verb": "create+start+delete", "load": load });
    let of = tabulate("start", &title, &arms, &times, &more);
    if let Some(crun) = of("crun") {
        for name in ["dormouse", crate::SPARES, crate::RUNNERS, crate::BOTH, "dormouse-oci"] {
            if let Some(ours) = of(name) {
                promise(&format!("create+start+delete, {name}, of crun"), ours / crun, 0.3);
            }
        }
    }
    Ok(())
}

fn ours(name: &str, bench: &Bench) -> Arm {
    let (root, exe) = (bench.path("root"), bench.dormouse().get_program().to_owned());
    Arm::new(name, move |n| {
        let mut command = Command::new("sh");
        command.args(["-c", OURS]).arg(&exe).arg(&root).arg(format!("life-{n}"));
        command
    })
}

fn of_bundle(bench: &Bench, name: &str, program: &Path) -> Result<Arm> {
    let bundle = bench.bundle(&format!("bundle-{name}-life"), false)?;
    let (state, program) = (bench.path(Bench::STATE).join(name), PathBuf::from(program));
    let mut arm = Arm::new(name, move |n| {
        let mut command = Command::new("sh");
        command.args(["-c", OCI]).arg(&program).arg(&state);
        command.arg(format!("life-{n}")).arg(&bundle);
        command
    });
    arm.hide_v2 = name == "crun";
    Ok(arm)
}
