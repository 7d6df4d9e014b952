//! The commands of a podman user: exit codes and outputs of Dormouse beside those of podman.
//!
//! Where podman is installed it runs in the same test, on a host of its own, and both must answer alike.
//! Elsewhere Dormouse is compared with the recorded answers of podman 4.3.1 (Debian 12). Ids are replaced
//! by a word, and `localhost/`, podman's registry of local images, is left out. Texts of errors differ; an
//! error of Dormouse is one line.

use std::path::Path;

use dormouse_testkit::{Host, Output, image, soon, wait_until};

use crate::podman::Podman;

/// What must be the same.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Same {
    /// The exit code and the standard output.
    All,
    /// The same, as soon as the recorded output is there.
    Soon,
    /// The same, in any order of lines.
    Lines,
    /// The exit code.
    Code,
}
use Same::{All, Code, Lines, Soon};

/// A command, the exit code and the output of podman 4.3.1. `FILE` is a file for this test.
type Step = (&'static str, Same, i32, &'static str);

const WALK: &[Step] = &[
    // run
    ("run --rm --network none box echo hello", All, 0, "hello"),
    ("run --rm --network none box sh -c 'exit 3'", All, 3, ""),
    ("run --rm --network none box nosuch", All, 127, ""),
    ("run --rm --network none box /etc/passwd", All, 126, ""),
    ("run --rm --nosuch box true", All, 125, ""),
    ("run --rm --network none -h box.example.org box hostname -f", All, 0, "box.example.org"),
    ("run --rm --network none -e A=1 -w /tmp box sh -c 'echo $A; pwd'", All, 0, "1\n/tmp"),
    ("run --rm --network none -u 7:8 box sh -c 'id -u; id -g'", All, 0, "7\n8"),
    ("run --rm --network none --entrypoint /bin/echo box a b", All, 0, "a b"),
    ("run --rm --network none --read-only box touch /x", Code, 1, ""),
    ("run --rm --network none box sh -c 'test -c /dev/ptmx && ls /dev/pts'", All, 0, "ptmx"),
    (
        "run --rm --network none --add-host far:10.1.2.3 box grep far /etc/hosts",
        All,
        0,
        "10.1.2.3 far",
    ),
    (
        "run --rm --network none --shm-size 1m box sh -c 'df -k /dev/shm | grep -o \" 1024 .* 0%\"'",
        All,
        0,
        "1024 0 1024 0%",
    ),
    ("run --rm --network none --oom-score-adj 500 box cat /proc/self/oom_score_adj", All, 0, "500"),
    (
        "run -d --name c --network none --label x=y -e A=1 box sh -c 'echo out; sleep 1000'",
        All,
        0,
        "ID",
    ),
    ("run --name c --network none box true", All, 125, ""),
    // ps
    ("ps --format '{{.Names}} {{.Image}}'", All, 0, "c box:latest"),
    ("ps --format 'table {{.Names}}\\t{{.Image}}'", All, 0, "NAMES IMAGE\nc box:latest"),
    ("ps -aq --no-trunc", All, 0, "ID"),
    ("ps --filter label=x=y --format '{{.Names}}'", All, 0, "c"),
    ("ps -q --filter name=nosuch", All, 0, ""),
    ("ps -q --filter name=^c$", All, 0, "ID"),
    ("ps -q --filter name=^cc$", All, 0, ""),
    ("container exists c", All, 0, ""),
    ("container exists nosuch", All, 1, ""),
    ("image exists nowhere", All, 1, ""),
    ("ps --format '{{.Nope}}'", All, 125, ""),
    ("ps --nosuch", All, 125, ""),
    ("container ls -q", All, 0, "ID"),
    // inspect
    (
        "inspect -f '{{.State.Status}} {{.State.Running}} {{.State.ExitCode}}' c",
        All,
        0,
        "running true 0",
    ),
    (
        "inspect -f '{{.Name}} {{.ImageName}} {{.Path}} {{.Config.Cmd}}' c",
        All,
        0,
        "c box:latest sh [sh -c echo out; sleep 1000]",
    ),
    (
        "inspect -f '{{.Config.Labels.x}} {{.Config.Labels.none}} {{.Config.WorkingDir}}' c",
        All,
        0,
        "y <no value> /",
    ),
    (
        "inspect -f '{{json .Config.Cmd}} {{json .Mounts}} {{len .Args}} {{upper .Name}}' c",
        All,
        0,
        "[\"sh\",\"-c\",\"echo out; sleep 1000\"] [] 2 C",
    ),
    (
        "inspect -f '{{if .State.Running}}up{{else}}down{{end}} {{range .Args}}[{{.}}]{{end}}' c",
        All,
        0,
        "up [-c][echo out; sleep 1000]",
    ),
    ("inspect -f '{{.Nope}}' c", All, 125, ""),
    ("inspect -f '{{.State' c", All, 125, ""),
    ("inspect -f '{{nofn .State}}' c", All, 125, ""),
    ("inspect nosuch", All, 125, "[]"),
    // No hexadecimal digit as a name of an image: podman finds an image by the first digit of its id.
    ("inspect --type image nowhere", All, 125, "[]"),
    ("container inspect -f '{{.Name}}' c", All, 0, "c"),
    // logs, exec, cp
    ("logs c", Soon, 0, "out"),
    ("logs nosuch", All, 125, ""),
    ("exec c echo in", All, 0, "in"),
    ("exec c sh -c 'exit 7'", All, 7, ""),
    ("exec c nosuch", All, 127, ""),
    ("exec nosuch true", All, 125, ""),
    ("exec -e B=2 -w /tmp c sh -c 'echo $A$B; pwd'", All, 0, "12\n/tmp"),
    ("cp FILE c:/tmp/file", All, 0, ""),
    ("exec c cat /tmp/file", All, 0, "text"),
    ("cp c:/nosuch FILE", All, 125, ""),
    ("cp c:/tmp/file FILE.copy", All, 0, ""),
    ("cp FILE.copy c:/home/again", All, 0, ""),
    ("exec c cat /home/again", All, 0, "text"),
    ("cp c:/home FILE.dir", All, 0, ""),
    ("cp FILE.dir/again c:/tmp/third", All, 0, ""),
    ("exec c sh -c 'cat /tmp/third; ls /tmp'", All, 0, "text\nfile\nthird"),
    ("cp FILE.nosuch c:/tmp", All, 125, ""),
    // life
    ("pause c", All, 0, "c"),
    ("inspect -f '{{.State.Status}} {{.State.Paused}}' c", All, 0, "paused true"),
    ("unpause c", All, 0, "c"),
    ("stop -t 0 c", All, 0, "c"),
    (
        "inspect -f '{{.State.Status}} {{.State.ExitCode}} {{.State.Running}}' c",
        All,
        0,
        "exited 137 false",
    ),
    ("ps -a --filter status=exited --format '{{.Names}}'", All, 0, "c"),
    ("ps -a --filter exited=137 --format '{{.Names}}'", All, 0, "c"),
    ("ps -a --filter exited=0 --format '{{.Names}}'", All, 0, ""),
    ("stop nosuch", All, 125, ""),
    ("start c", All, 0, "c"),
    // A container that runs is left as it is.
    ("start c", All, 0, ""),
    ("start --attach nosuch", All, 125, ""),
    ("restart -t 0 c", All, 0, "c"),
    ("rename c d", All, 0, ""),
    ("rm d", All, 2, ""),
    ("kill d", All, 0, "d"),
    ("wait d", All, 0, "137"),
    ("rm d", All, 0, "d"),
    ("rm nosuch", All, 1, ""),
    ("rm -f nosuch", All, 0, ""),
    // The container sleeps where it can.
    (
        "run -d --name s --network none box sh -c 'trap \"echo TERM; exit 0\" TERM; echo up; sleep 1000 & wait'",
        All,
        0,
        "ID",
    ),
    ("logs s", Soon, 0, "up"),
    ("SLEEP s", Code, 0, ""),
    ("ps --format '{{.Names}} {{.State}}' --filter name=nosuch", All, 0, ""),
    ("inspect -f '{{.State.Status}} {{.State.Running}}' s", All, 0, "running true"),
    ("stop s", All, 0, "s"),
    ("inspect -f '{{.State.Status}} {{.State.ExitCode}}' s", All, 0, "exited 0"),
    ("logs s", Soon, 0, "up\nTERM"),
    ("rm s", All, 0, "s"),
    // create
    (
        "create --name f --network none --restart on-failure:3 --memory 64m --cpus 0.5 --pids-limit 50 \
      --entrypoint /bin/echo box a b",
        All,
        0,
        "ID",
    ),
    (
        "inspect -f '{{.State.Status}} {{.Config.Cmd}} {{.Path}} {{.Args}}' f",
        All,
        0,
        "created [a b] /bin/echo [a b]",
    ),
    (
        "inspect -f '{{.HostConfig.Memory}} {{.HostConfig.NanoCpus}} {{.HostConfig.PidsLimit}}' f",
        All,
        0,
        "67108864 500000000 50",
    ),
    (
        "inspect -f '{{with .HostConfig.RestartPolicy}}{{.Name}}:{{.MaximumRetryCount}}{{end}}' f",
        All,
        0,
        "on-failure:3",
    ),
    ("start -a f", All, 0, "a b"),
    ("logs f", Soon, 0, "a b"),
    ("logs -f --tail 1 f", All, 0, "a b"),
    ("rm f", All, 0, "f"),
    // prune
    ("create --name h --network none box true", All, 0, "ID"),
    ("start -a h", All, 0, ""),
    ("container prune -f", All, 0, "ID"),
    ("container prune --force", All, 0, ""),
    ("image prune -f", Code, 0, ""),
    ("system prune -f", Code, 0, ""),
    ("images -q", All, 0, "ID"),
    // volumes
    ("volume create v", All, 0, "v"),
    ("volume create v", All, 125, ""),
    ("volume ls -q", All, 0, "v"),
    ("volume ls --format '{{.Name}} {{.Driver}} {{.Scope}}'", All, 0, "v local local"),
    ("volume inspect -f '{{.Name}} {{.Labels}}' v", All, 0, "v map[]"),
    ("volume inspect nosuch", All, 125, "[]"),
    ("volume exists v", All, 0, ""),
    ("volume exists nosuch", All, 1, ""),
    ("run --rm --network none -v v:/home:nocopy box ls /home", All, 0, ""),
    ("run --rm --network none -v v:/data box sh -c 'echo kept > /data/f'", All, 0, ""),
    ("run --rm --network none -v v:/data:ro box cat /data/f", All, 0, "kept"),
    ("run --rm --network none -v v:/data:ro box touch /data/f", Code, 1, ""),
    ("run -d --name g --network none -v w:/home box sleep 1000", All, 0, "ID"),
    ("exec g ls /home", All, 0, "user"),
    (
        "inspect -f '{{range .Mounts}}{{.Type}} {{.Name}} {{.Destination}} {{.RW}}{{end}}' g",
        All,
        0,
        "volume w /home true",
    ),
    ("volume rm w", All, 2, ""),
    ("rm -f -t 0 g", Code, 0, ""),
    ("volume rm w", All, 0, "w"),
    ("volume rm nosuch", All, 1, ""),
    ("volume prune -f", All, 0, "v"),
    ("volume ls -q", All, 0, ""),
    // images
    ("tag box other:3", All, 0, ""),
    ("images --format '{{.Repository}}:{{.Tag}}'", Lines, 0, "box:latest\nother:3"),
    ("image inspect -f '{{.Os}} {{len .RootFS.Layers}}' other:3", All, 0, "linux 1"),
    ("save -q -o FILE.tar box", Code, 0, ""),
    ("rmi other:3", Code, 0, ""),
    ("rmi nosuch", All, 1, ""),
    ("image rm nosuch", All, 1, ""),
    ("load -i FILE.tar", All, 0, "Loaded image: box:latest"),
    ("load -i FILE", All, 125, ""),
    ("load -i FILE.nosuch", All, 125, ""),
    (
        "system df --format '{{.Type}} {{.Total}} {{.Active}}'",
        All,
        0,
        "Images 1 0\nContainers 0 0\nLocal Volumes 0 0",
    ),
    ("nosuch", All, 125, ""),
];

/// The words of a command line with quotes of both kinds, as far as this table needs them.
fn words(line: &str, file: &Path) -> Vec<String> {
    let mut all = vec![String::new()];
    let mut quote = None;
    for c in line.chars() {
        match (quote, c) {
            (None, '\'') => quote = Some(c),
            (Some('\''), '\'') => quote = None,
            (None, ' ') => all.push(String::new()),
            _ => all.last_mut().expect("never empty").push(c),
        }
    }
    let file = file.display().to_string();
    all.into_iter()
        .filter(|word| !word.is_empty())
        .map(|word| word.replace("FILE", &file))
        .collect()
}

/// The output without ids, podman's registry of local images, and the width of columns.
fn plain(text: &str) -> String {
    let is_id = |word: &str| word.len() >= 12 && word.bytes().all(|b| b.is_ascii_hexdigit());
    let word = |word: &str| match word {
        id if is_id(id) => "ID".to_owned(),
        other => other.replace("localhost/", ""),
    };
    let line = |line: &str| line.split_whitespace().map(word).collect::<Vec<_>>().join(" ");
    text.lines().map(line).collect::<Vec<_>>().join("\n").trim().to_owned()
}

fn answer(out: &Output, same: Same) -> (i32, String) {
    let mut text = plain(&out.stdout);
    if same == Lines {
        let mut lines: Vec<&str> = text.lines().collect();
        lines.sort_unstable();
        text = lines.join("\n");
    }
    (out.status, if same == Code { String::new() } else { text })
}

/// Runs every command, and returns the answers. `Soon` waits for the recorded output.
fn walk(mut command: impl FnMut(&[&str]) -> Output, file: &Path) -> Vec<(i32, String, Output)> {
    let mut all = Vec::new();
    for (line, same, code, recorded) in WALK {
        let words = words(line, file);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut out = command(&words);
        if *same == Soon {
            wait_until(soon(), || {
                out = command(&words);
                answer(&out, *same) == (*code, (*recorded).to_owned())
            });
        }
        let (status, text) = answer(&out, *same);
        all.push((status, text, out));
    }
    all
}

#[test]
fn commands_of_podman_users_answer_as_podman_does() {
    assert!(WALK.len() >= 50);
    let host = Host::new();
    host.import(&image::busybox(), "box");
    let file = host.dir().join("file");
    std::fs::write(&file, "text\n").expect("our directory");
    let ours = walk(
        |words| match words {
            ["SLEEP", name] => {
                host.put_to_sleep(name);
                host.sh("true")
            }
            words => host.dm(words),
        },
        &file,
    );
    let theirs = podman_walk();
    let is_recorded_version = podman_version().is_some_and(|version| version.ends_with(" 4.3.1"));
    let mut differ = Vec::new();
    for (n, (line, same, code, recorded)) in WALK.iter().enumerate() {
        let recorded = (*code, if *same == Code { String::new() } else { (*recorded).to_owned() });
        let expected = match theirs.as_ref().and_then(|theirs| theirs.get(n)) {
            Some((status, text, _)) => (*status, text.clone()),
            None => recorded.clone(),
        };
        // The table is what is compared elsewhere, so it must be what podman answers.
        if theirs.is_some() && is_recorded_version && recorded != expected {
            differ.push(format!("{line}\n  recorded: {recorded:?}\n  podman: {expected:?}"));
        }
        let (status, text, out) = &ours[n];
        if (*status, text.clone()) != expected {
            differ
                .push(format!("{line}\n  podman: {expected:?}\n  here: {status} {text:?}\n{out}"));
        }
        let is_error = matches!(status, 1 | 2 | 125..=127) && !line.contains(" exists ");
        if is_error && !line.contains(" touch ") && out.stderr.lines().count() != 1 {
            differ.push(format!("{line}: not one line of error\n{out}"));
        }
    }
    assert!(differ.is_empty(), "{} of {} differ:\n{}", differ.len(), WALK.len(), differ.join("\n"));
    assert_eq!(host.dm(&["ps", "-aq"]).ok(), "");
}

/// The version of podman, where it is installed.
fn podman_version() -> Option<String> {
    let out = std::process::Command::new("podman").arg("--version").output().ok()?;
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

/// The answers of podman, where it is installed.
fn podman_walk() -> Option<Vec<(i32, String, Output)>> {
    if podman_version().is_none() {
        eprintln!("podman is not installed: compared with recorded answers of podman 4.3.1");
        return None;
    }
    let podman = Podman::new();
    let file = podman.host().dir().join("file");
    std::fs::write(&file, "text\n").expect("our directory");
    let asleep = |words: &[&str]| matches!(words, ["SLEEP", _]);
    let nothing = || podman.host().sh("true");
    let command = |words: &[&str]| if asleep(words) { nothing() } else { podman.podman(words) };
    Some(walk(command, &file))
}

/// The name is the second word of `import`, or an option.
#[test]
fn import_takes_name_as_word_or_option() {
    let host = Host::new();
    let dir = image::busybox();
    let dir = dir.to_str().expect("UTF-8");
    host.dm(&["import", "-q", dir, "word:1"]).ok();
    host.dm(&["import", "-q", "--name", "option", dir]).ok();
    host.dm(&["import", "-q", "--name", "option", dir, "word"]).err(125);
    let names = host.dm(&["images", "--format", "{{.Repository}}:{{.Tag}}"]).ok();
    let mut names: Vec<&str> = names.lines().collect();
    names.sort_unstable();
    assert_eq!(names, ["option:latest", "word:1"]);
}

/// `--add-host` adds lines in every mode of the network.
#[test]
fn hosts_are_added_in_every_network() {
    let host = Host::with_busybox();
    for net in ["none", "host", "address"] {
        let words = ["run", "--rm", "--net", net, "--add-host", "far:10.1.2.3", "busybox"];
        let all = host.dm(&[&words[..], &["cat", "/etc/hosts"]].concat()).ok();
        assert!(all.lines().any(|line| line == "10.1.2.3\tfar"), "{net}: {all}");
        assert!(all.contains("localhost"), "{net}: {all}");
        let plain = host.dm(&["run", "--rm", "--net", net, "busybox", "cat", "/etc/hosts"]).ok();
        assert!(!plain.contains("far"), "{net}: {plain}");
    }
}

/// Set from outside: the first process is no user of the host's root.
#[test]
fn oom_score_is_set_for_first_process_and_exec() {
    let host = Host::with_busybox();
    let read = ["cat", "/proc/self/oom_score_adj"];
    let run = ["run", "-d", "--name", "a", "--oom-score-adj", "300", "busybox", "sleep", "1000"];
    host.dm(&run).ok();
    assert_eq!(host.dm(&["exec", "a", "cat", "/proc/1/oom_score_adj"]).ok(), "300");
    assert_eq!(host.dm(&[&["exec", "a"], &read[..]].concat()).ok(), "300");
    host.put_to_sleep("a");
    host.dm(&["wake", "a"]).ok();
    assert_eq!(host.dm(&["exec", "a", "cat", "/proc/1/oom_score_adj"]).ok(), "300");
    // A value that the host refuses stays higher.
    let low = ["run", "--rm", "--oom-score-adj", "-5", "busybox"];
    let low = host.dm(&[&low[..], &read].concat()).ok();
    assert!(["-5", "0"].contains(&low.as_str()), "{low}");
}

/// `inspect` without options prints an array, and asleep containers have a state of their own beside
/// podman's.
#[test]
fn inspect_prints_array_with_common_fields_and_own_state() {
    let host = Host::with_busybox();
    let limits = ["--memory", "64m", "--sleep-after", "90s", "--wake-on", "call"];
    let words =
        [&["run", "-d", "--name", "a"], &limits[..], &["busybox", "sleep", "1000"]].concat();
    host.dm(&words).ok();
    let read = |words: &[&str]| -> serde_json::Value {
        serde_json::from_str(&host.dm(words).ok()).expect("JSON")
    };
    let all = read(&["inspect", "a", "busybox"]);
    assert_eq!(all.as_array().map(Vec::len), Some(2));
    let (a, image) = (&all[0], &all[1]);
    assert_eq!(a["State"]["Status"], "running");
    assert_eq!(a["State"]["Pid"], host.inspect("a")["pid"]);
    assert_eq!(a["Config"]["Cmd"], serde_json::json!(["sleep", "1000"]));
    assert_eq!(a["HostConfig"]["Memory"], 64 << 20);
    assert_eq!(a["NetworkSettings"]["IPAddress"], host.inspect("a")["address"]);
    assert_eq!(a["Dormouse"]["SleepAfterMs"], 90_000);
    assert_eq!(a["Image"], image["Id"]);
    assert_eq!(image["RootFS"]["Layers"].as_array().map(Vec::len), Some(1));
    host.put_to_sleep("a");
    let a = &read(&["inspect", "a"])[0];
    let state = (&a["State"]["Status"], &a["State"]["Pid"], &a["Dormouse"]["State"]);
    assert_eq!(state, (&"running".into(), &0.into(), &"asleep".into()));
    assert_eq!(read(&["ps", "--format", "json"])[0]["Names"][0], "a");
    assert_eq!(read(&["images", "--format", "json"])[0]["Containers"], 1);
    host.dm(&["rm", "-f", "a"]).ok();
}
