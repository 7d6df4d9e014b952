//! Starts with parts made ahead that are not those of plain containers: a kill at any step leaves the state before or
//! the state after it.

use super::*;

/// Starts containers with these words until spares are ready for them, and returns the spares.
pub(super) fn stock_with(host: &Host, run: &[&str]) -> Vec<String> {
    let mut there = Vec::new();
    let is_stocked = wait_until(soon(), || {
        come_and_go(host, run);
        there = spares(host);
        there.len() >= 2
    });
    assert!(is_stocked, "no spares: {:?}", host.processes());
    there
}

/// The command is killed before and after it has adopted a spare, for a container with limits and views of them.
#[test]
fn big_run_with_limits_and_spare_survives_kill_at_any_step() {
    const RUN_LIMITED: Words =
        &["run", "--rm", "--name", "x", "--memory", "64m", "--cpus", "1", "busybox", "true"];
    const RUN_LIMITED_ONCE: Words =
        &["run", "--rm", "--memory", "64m", "--cpus", "1", "busybox", "true"];
    const LIMITED: Verb = Verb {
        before: &[],
        command: RUN_LIMITED,
        states: &["none", "created", "running", "stopped"],
        after: &[REMOVE, RUN_LIMITED, REMOVE],
    };
    let scene = Scene::with_spares();
    let keeper = scene.host.keeper().expect("a keeper");
    let mut adopted = 0;
    for number in (0..).step_by(fault_stride()) {
        let there = stock_with(&scene.host, RUN_LIMITED_ONCE);
        let Some((mut led, call)) = lead_to(&scene.host, RUN_LIMITED, number) else { break };
        adopted += usize::from(is_adopted(&scene.host, &there));
        let slow = Slow::of_step(number)[0];
        slow.kill(&mut led, keeper);
        let what = format!("run killed at step {number}, {call}, slow: {slow:?}");
        LIMITED.assert_usable(&scene, &what);
    }
    assert!(adopted * fault_stride() > 5, "{adopted} runs had adopted a spare");
}

/// The same for a new container that goes on from a checkpoint.
#[test]
fn restore_with_spare_survives_kill_at_any_step() {
    const RESTORE_NEW: Words = &["restore", "--name", "x", "t"];
    const NEW: Verb = Verb {
        before: &[],
        command: RESTORE_NEW,
        states: &["none", "created", "running", "stopped"],
        after: &[REMOVE, RESTORE_NEW, EXEC, REMOVE],
    };
    let mut scene = Scene::with_spares();
    let serve = ["run", "-d", "--name", "t", "busybox", "httpd", "-f", "-p", "80", "-h", "/www"];
    scene.all(&[&serve, &["checkpoint", "t"]]);
    scene.host.await_settlers();
    scene.before = Counts::of(&scene.host);
    let keeper = scene.host.keeper().expect("a keeper");
    let mut adopted = 0;
    for number in (0..).step_by(fault_stride()) {
        let there = crate::spares::stock(&scene.host).into_iter().collect::<Vec<_>>();
        let Some((mut led, call)) = lead_to(&scene.host, RESTORE_NEW, number) else { break };
        adopted += usize::from(is_adopted(&scene.host, &there));
        let slow = Slow::of_step(number)[0];
        slow.kill(&mut led, keeper);
        let what = format!("restore killed at step {number}, {call}, slow: {slow:?}");
        NEW.assert_usable(&scene, &what);
    }
    assert!(adopted * fault_stride() > 5, "{adopted} restores had adopted a spare");
}
