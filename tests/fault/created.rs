//! Containers that are created and started by two commands, with parts made ahead: a kill of either, of the nursery or
//! of the keeper leaves the state before it or the state after it.

use super::*;

/// Starts containers until spares are ready, of the kind that `create` takes without `--rm`, and returns them.
fn stock(host: &Host) -> Vec<String> {
    crate::spares::stock(host).into_iter().collect()
}

/// A container that is created and started by two commands.
const TWICE: Verb = Verb {
    before: &[],
    command: CREATE,
    states: &["none", "created", "running", "stopped"],
    after: &[REMOVE, CREATE, START, EXEC, REMOVE],
};

/// Whether `x` is created, and has a newborn that waits for its start.
fn has_newborn(host: &Host) -> bool {
    let x = host.inspect("x");
    host.root().join("run/c").join(x["id"].as_str().expect("an id")).exists()
}

/// The command is killed before and after it has adopted a spare, and has left it to the nursery.
#[test]
fn create_with_spare_survives_kill_at_any_step() {
    let scene = Scene::with_spares();
    let keeper = scene.host.keeper().expect("a keeper");
    let mut adopted = 0;
    for number in (0..).step_by(fault_stride()) {
        let there = stock(&scene.host);
        let Some((mut led, call)) = lead_to(&scene.host, CREATE, number) else { break };
        adopted += usize::from(is_adopted(&scene.host, &there));
        let slow = Slow::of_step(number)[0];
        slow.kill(&mut led, keeper);
        let what = format!("create killed at step {number}, {call}, slow: {slow:?}");
        TWICE.assert_usable(&scene, &what);
    }
    assert!(adopted * fault_stride() > 5, "{adopted} creates had adopted a spare");
}

/// The command is killed before and after it has taken the newborn of a created container from the nursery.
#[test]
fn start_with_spare_survives_kill_at_any_step() {
    let scene = Scene::with_spares();
    let keeper = scene.host.keeper().expect("a keeper");
    let (mut number, mut with, mut tried) = (0, 0, 0);
    loop {
        stock(&scene.host);
        scene.all(&[CREATE]);
        let is_kept = has_newborn(&scene.host);
        let led = lead_to(&scene.host, START, number);
        tried += 1;
        // One that starts from nothing has more steps. A second has passed on a busy host, or no spare was there.
        if !is_kept && tried % 4 != 0 {
            drop(led);
            scene.host.dm(REMOVE).ok();
            continue;
        }
        let Some((mut led, call)) = led else { break };
        with += usize::from(is_kept);
        let slow = Slow::of_step(number)[0];
        slow.kill(&mut led, keeper);
        let what = format!("start killed at step {number}, {call}, slow: {slow:?}, {is_kept}");
        TWICE.assert_usable(&scene, &what);
        number += fault_stride();
    }
    assert!(with > 0, "{with} starts had a newborn to take");
    scene.host.dm(REMOVE).ok();
    scene.is_clean("start without a kill");
}

/// The nursery is killed at each step while containers are created with its spares, and started.
#[test]
fn big_create_and_start_survive_nursery_killed_at_any_step() {
    let scene = Scene::with_spares();
    let host = &scene.host;
    let stride = if std::env::var("DORMOUSE_FAULT").as_deref() == Ok("all") { 1 } else { 7 };
    let mut killed = 0;
    for number in (0..).step_by(stride) {
        stock(host);
        let mut led = std::iter::repeat_with(|| Led::seize_if_alive(nursery(host)))
            .flatten()
            .next()
            .expect("an endless iterator");
        let commands = [host.dormouse(CREATE), host.dormouse(START)];
        let waiter =
            thread::spawn(|| commands.map(|command| run(command, b"", Duration::from_secs(60))));
        let call = (0..=number).try_fold("", |_, _| led.next_step());
        let what = format!("the nursery killed at step {number}, {call:?}");
        if call.is_some() {
            led.kill();
        }
        led.detach();
        for out in waiter.join().expect("the commands end") {
            assert_eq!(out.status, 0, "{what}: {out}");
        }
        TWICE.assert_usable(&scene, &what);
        if call.is_none() {
            break;
        }
        killed += 1;
    }
    assert!(killed * stride > 50, "{killed} kills");
}

/// The keeper is killed at each of its steps while a created container with a spare is started.
#[test]
fn big_start_with_spare_survives_keeper_killed_at_any_step() {
    let scene = Scene::with_spares();
    let host = &scene.host;
    for number in 0..40 {
        host.dm(&["exec", "other", "true"]).ok();
        stock(host);
        scene.all(&[CREATE]);
        let mut keeper = None;
        // One that was killed is replaced in a moment.
        assert!(wait_until(soon(), || {
            keeper = host.keeper();
            keeper.is_some()
        }));
        let pid = keeper.expect("a keeper");
        let mut led = Led::seize(pid);
        let command = host.dormouse(START);
        let waiter = thread::spawn(move || {
            let out = run(command, b"", Duration::from_secs(60));
            signal(pid, Signal::WINCH);
            out
        });
        let call = (0..=number).try_fold("", |_, _| led.next_step());
        let what = format!("the keeper killed beside a start at step {number}, {call:?}");
        if call.is_some() {
            led.kill();
        }
        led.detach();
        let out = waiter.join().expect("the command ends");
        assert!(out.status != 101 && out.status < 128, "{what}: {out}");
        TWICE.assert_usable(&scene, &what);
        if call.is_none() {
            break;
        }
    }
}
