//! Hints for options and verbs of podman and docker that this program does not have.
//!
//! Uses nothing of this crate.

/// Options, with the way to the same result.
const OPTIONS: &[(&[&str], &str)] = &[
    (&["--build-arg", "--file"], "images are built by other programs and read by 'dormouse load'"),
    (
        &["--cgroup-parent", "--cgroupns", "--cgroups", "--cgroup-conf"],
        "each container has a cgroup of its own",
    ),
    (&["--cpu-quota"], "use --cpus, such as --cpus 0.5"),
    (&["--device", "--device-cgroup-rule", "--gpus"], "containers get no devices of the host"),
    (
        &["--dns-option", "--dns-opt", "--dns-search"],
        "mount a file at /etc/resolv.conf with --volume",
    ),
    (
        &["--expose", "--publish-all"],
        "containers of a --domain reach all ports of each other; use --publish for the host",
    ),
    (&["--group-add"], "use --user USER:GROUP"),
    (
        &[
            "--health-cmd",
            "--health-interval",
            "--health-retries",
            "--health-start-period",
            "--health-timeout",
            "--no-healthcheck",
        ],
        "there are no health checks",
    ),
    (&["--ipc", "--pid", "--uts"], "each container has namespaces of its own"),
    (
        &["--link", "--network-alias"],
        "containers of a --domain find each other by name and host name",
    ),
    (&["--log-opt"], "use --log-max-size"),
    (&["--platform", "--arch", "--os", "--variant"], "images are for this machine only"),
    (&["--pod", "--pod-id-file"], "containers of a --domain share a network stack"),
    (&["--replace"], "remove the container first: dormouse rm --force NAME"),
    (&["--secret"], "mount a file with --volume FILE:PATH:ro"),
    (&["--tz"], "use --env TZ=ZONE"),
    (
        &["--userns", "--uidmap", "--gidmap", "--subuidname", "--subgidname"],
        "each container has host ids of its own; see --ids",
    ),
    (&["--volumes-from"], "mount the same volumes with --volume NAME:PATH"),
];

/// Verbs, with the way to the same result.
const VERBS: &[(&[&str], &str)] = &[
    (
        &["build", "buildx"],
        "build with another program: podman build, then podman save | dormouse load",
    ),
    (&["compose", "kube", "play", "generate"], "containers are started by 'dormouse run'"),
    (&["help"], "use 'dormouse VERB --help'"),
    (&["healthcheck"], "there are no health checks"),
    (&["machine"], "containers run on this host"),
    (&["network"], "containers of a trust domain share a network: 'dormouse run --domain NAME'"),
    (&["pod"], "containers of a trust domain share a network stack: 'dormouse run --domain NAME'"),
    (&["search"], "'dormouse pull' takes a name of a registry"),
    (&["untag"], "use 'dormouse rmi NAME'; the image stays while it has another name"),
    (&["secret"], "mount a file with 'dormouse run --volume FILE:PATH:ro'"),
];

/// Returns the hint for an option or a verb of other engines.
pub(crate) fn for_word(word: &str) -> Option<&'static str> {
    let word = word.split('=').next().unwrap_or(word);
    let table = if word.starts_with('-') { OPTIONS } else { VERBS };
    table.iter().find(|(words, _)| words.contains(&word)).map(|(_, hint)| *hint)
}

/// Returns whether a suggestion is a likely misspelling: at most two letters differ, or one of the words
/// begins with the other.
pub(crate) fn is_close(word: &str, suggestion: &str) -> bool {
    let word = word.split('=').next().unwrap_or(word);
    let [a, b] = [word, suggestion].map(|text| text.trim_start_matches('-'));
    if a.len().min(b.len()) >= 3 && (a.starts_with(b) || b.starts_with(a)) {
        return true;
    }
    distance(a, b) <= 2 && a.len().max(b.len()) > 3
}

/// The number of letters to insert, delete or replace (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut corner = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let replaced = corner + usize::from(x != *y);
            corner = row[j + 1];
            row[j + 1] = replaced.min(corner + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggestion_is_kept_for_misspelled_words_only() {
        for (word, suggestion) in [
            ("--memroy", "--memory"),
            ("--vol", "--volume"),
            ("runn", "run"),
            ("--nam=x", "--name"),
        ] {
            assert!(is_close(word, suggestion), "{word}");
        }
        for (word, suggestion) in [
            ("--device", "--env-file"),
            ("network", "restore"),
            ("--format", "--from"),
            ("ls", "ps"),
        ] {
            assert!(!is_close(word, suggestion), "{word}");
        }
    }

    #[test]
    fn options_of_other_engines_have_hints() {
        assert_eq!(for_word("--device=/dev/kvm"), for_word("--device"));
        assert!(for_word("--tz").is_some_and(|hint| hint.contains("TZ=ZONE")));
        assert!(for_word("network").is_some() && for_word("--network").is_none());
        for (words, _) in OPTIONS.iter().chain(VERBS) {
            for word in *words {
                assert!(for_word(word).is_some(), "{word}");
            }
        }
    }
}
