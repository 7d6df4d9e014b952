//! `cargo xtask tidy`: taste with reasons, made a test.
//!
//! Each rule is a function from a file's path and text to findings, so that each is tried on a few
//! lines in the tests below. Rules, and what they are for:
//!
//! - *floors*: the direction of dependencies ([`crate::floor`]).
//! - *circles*: the modules of a crate form a line ([`crate::circle`]).
//! - *unsafe*: lives in `kernel`, `bpf`, `keeper`, `entry` and `checkpoint/src/inject`, where a reader
//!   expects it; every other crate root says `#![forbid(unsafe_code)]`.
//! - *promises*: each row of `SPECIFICATION.md` names the test or the benchmark that holds it, and
//!   that test exists.
//! - *features*: each row of `docs/kernel-features.md` is probed by using it, so that `dormouse
//!   check` and the table say the same (a test of `kernel` holds the other direction).
//! - *marks*: a mark for later carries its issue.
//! - *lengths*: lines, functions, files; a long file opens with its theory.
//! - *places*: nothing of the machine it was written on is in the tree.
//! - *language*: plain words, counted over comments and documents, and the form of commits
//!   ([`crate::language`]).
//! - *guest*: every test of `tests/guest.txt` exists.
//!
//! A finding fails; a note is printed on request, and is for the next one who works there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::guest::SMOKE;
use crate::{circle, floor, language};

/// Columns of a line of code at most, and those from which it should be broken: rustfmt breaks
/// code there, comments and strings are for their writers.
const LINE_COLUMNS_MAX: usize = 120;
const LINE_COLUMNS_NOTE: usize = 100;
/// Lines of a file at most, and those from which it should be split.
const FILE_LINES_MAX: usize = 1500;
const FILE_LINES_NOTE: usize = 800;
/// Lines of a file from which it opens with its theory.
const THEORY_LINES: usize = 300;
/// Lines of a function at most, and those from which it should be split.
const FUNCTION_LINES_MAX: usize = 200;
const FUNCTION_LINES_NOTE: usize = 80;

/// Crates that may hold `unsafe`, and the one folder that may beside them.
const UNSAFE_CRATES: &[&str] = &["kernel", "bpf", "keeper", "entry"];
/// Crates whose roots cannot forbid it: one with that folder, one whose `main` is libFuzzer's.
const UNSAFE_ROOTS: &[&str] = &["checkpoint", "fuzz"];
const UNSAFE_FOLDER: &str = "crates/checkpoint/src/inject/";

/// One thing that is not as it should be.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    path: String,
    /// From 1; 0 is the file as a whole.
    line: usize,
    text: String,
    /// It is allowed, but should become smaller.
    is_note: bool,
}

impl Finding {
    fn new(path: &str, line: usize, text: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, text: text.into(), is_note: false }
    }

    fn note(path: &str, line: usize, text: impl Into<String>) -> Self {
        Self { is_note: true, ..Self::new(path, line, text) }
    }
}

/// Checks the tree at `top`; the exit status says whether anything was found.
pub fn run(top: &Path, with_notes: bool) -> Result<ExitCode> {
    let mut findings = floors(top)?;
    let files = read_tree(top)?;
    for (path, text) in &files {
        findings.extend(marks(path, text));
        findings.extend(places(path, text));
        findings.extend(lengths(path, text));
        findings.extend(functions(path, text));
        findings.extend(unsafe_code(path, text));
    }
    findings.extend(promises(&files));
    findings.extend(features(&files));
    findings.extend(guest_tests(&files));
    findings.extend(circle::judge(&files).into_iter().map(|complaint| Finding {
        path: complaint.path,
        line: complaint.line,
        text: complaint.text,
        is_note: complaint.is_allowed,
    }));
    for judgement in language::judge(&files) {
        println!("{}", judgement.line);
        findings
            .extend(judgement.complaints.into_iter().map(|text| Finding::new("language", 0, text)));
    }
    let commits = language::commits(top)?;
    findings.extend(commits.into_iter().map(|text| Finding::new("commits", 0, text)));
    let mut found = 0;
    for finding in findings.iter().filter(|f| with_notes || !f.is_note) {
        let kind = if finding.is_note { "note: " } else { "" };
        println!("{}:{}: {kind}{}", finding.path, finding.line, finding.text);
        found += usize::from(!finding.is_note);
    }
    println!("tidy: {} files, {found} findings", files.len());
    Ok(if found == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Every text file of the tree with its path from the top.
fn read_tree(top: &Path) -> Result<Vec<(String, String)>> {
    let mut files = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let absolute = top.join(&folder);
        let listing = fs::read_dir(&absolute).with_context(|| format!("{}", absolute.display()))?;
        for entry in listing {
            let entry = entry?;
            let name = entry.file_name();
            let path = folder.join(&name);
            let kind = entry.file_type()?;
            if kind.is_dir() && name != "target" && name != ".git" {
                folders.push(path);
            } else if kind.is_file()
                && name != "Cargo.lock"
                && name != ".git"
                && let Ok(text) = fs::read_to_string(entry.path())
            {
                files.push((path.to_string_lossy().into_owned(), text));
            }
        }
    }
    files.sort();
    Ok(files)
}

fn is_code(path: &str) -> bool {
    [".rs", ".c", ".h", ".sh", ".py"].iter().any(|end| path.ends_with(end))
        || ["test", "demo", "bench", "justfile", ".ci/run"].contains(&path)
}

/// The floors, from `cargo metadata`.
fn floors(top: &Path) -> Result<Vec<Finding>> {
    let metadata = cargo_metadata::MetadataCommand::new()
        .manifest_path(top.join("Cargo.toml"))
        .no_deps()
        .exec()
        .context("cargo metadata")?;
    let plain = |name: &str| name.strip_prefix("dormouse-").map(str::to_owned);
    let mut findings = Vec::new();
    for package in &metadata.packages {
        let manifest = package.manifest_path.as_std_path();
        let path = manifest.strip_prefix(top).unwrap_or(manifest).display().to_string();
        let Some(user) = plain(&package.name) else {
            findings.push(Finding::new(&path, 0, "the package's name lacks the prefix dormouse-"));
            continue;
        };
        for dependency in &package.dependencies {
            let Some(used) = plain(&dependency.name) else { continue };
            let how = match dependency.kind {
                cargo_metadata::DependencyKind::Development => floor::Use::Test,
                _ => floor::Use::Normal,
            };
            let complaint = floor::complaint(&user, &used, how);
            findings.extend(complaint.map(|text| Finding::new(&path, 0, text)));
        }
        for target in &package.targets {
            let is_program = target.is_lib() || target.is_bin();
            let user = user.as_str();
            if is_program && !UNSAFE_CRATES.contains(&user) && !UNSAFE_ROOTS.contains(&user) {
                let source = target.src_path.as_std_path();
                let text = fs::read_to_string(source)
                    .with_context(|| format!("reading {}", source.display()))?;
                let path = source.strip_prefix(top).unwrap_or(source).display().to_string();
                findings.extend(forbids_unsafe(&path, &text));
            }
        }
    }
    Ok(findings)
}

fn forbids_unsafe(path: &str, text: &str) -> Option<Finding> {
    let forbids = text.lines().any(|line| line.trim() == "#![forbid(unsafe_code)]");
    (!forbids).then(|| Finding::new(path, 0, "the crate root lacks #![forbid(unsafe_code)]"))
}

/// `unsafe` where a reader does not expect it; covers tests and build scripts, which the crate
/// root's attribute does not.
fn unsafe_code(path: &str, text: &str) -> Vec<Finding> {
    let allowed = UNSAFE_CRATES.iter().any(|name| path.starts_with(&format!("crates/{name}/")))
        || path.starts_with(UNSAFE_FOLDER);
    if allowed || !path.ends_with(".rs") {
        return Vec::new();
    }
    let starts = ["unsafe {", "unsafe fn ", "unsafe impl ", "unsafe extern "];
    let hit = |line: &str| {
        // A quoted mention is no use; the list above is one.
        let code: String = line.split('"').step_by(2).collect();
        let code = code.split("//").next().unwrap_or("");
        starts.iter().any(|start| code.contains(start))
    };
    numbered(text)
        .filter(|(_, line)| hit(line))
        .map(|(n, _)| Finding::new(path, n, "unsafe outside the crates that may hold it"))
        .collect()
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(n, line)| (n + 1, line))
}

/// Marks for later.
fn marks(path: &str, text: &str) -> Vec<Finding> {
    // In two halves, so that this list is not found by itself.
    let todo = concat!("TO", "DO");
    let banned = [concat!("FIX", "ME"), concat!("XX", "X:"), concat!("HA", "CK:")];
    let mut findings = Vec::new();
    for (n, line) in numbered(text) {
        let bare = line.match_indices(todo).any(|(at, _)| {
            let rest = &line[at + todo.len()..];
            let before = line[..at].chars().next_back();
            let word = before.is_some_and(char::is_alphanumeric)
                || rest.starts_with(|c: char| c.is_alphanumeric() || c == '_');
            let issue = rest
                .strip_prefix("(#")
                .and_then(|rest| rest.split_once(')'))
                .is_some_and(|(n, _)| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
            !word && !issue
        });
        let is_prose = path.ends_with(".md");
        if bare && !is_prose {
            findings.push(Finding::new(path, n, format!("a bare mark: write {todo}(#ISSUE)")));
        }
        if !is_prose && banned.iter().any(|mark| line.contains(mark)) {
            findings.push(Finding::new(path, n, "a mark of the kind that stays for ever"));
        }
    }
    findings
}

/// Paths and names of the machine it was written on.
fn places(path: &str, text: &str) -> Vec<Finding> {
    // In two halves, so that this list is not found by itself.
    let banned = [
        concat!("/wo", "rk/"),
        concat!("/fa", "rm/"),
        concat!("/tmp/stu", "dio"),
        concat!("sub", "agent"),
        concat!("CLA", "UDE"),
        concat!("AI assis", "tant"),
        concat!("deb.deb", "ian.org"),
        concat!("security.deb", "ian.org"),
        concat!("proxy.go", "lang.org"),
        concat!("py", "pi.org"),
        concat!("registry.np", "mjs.org"),
    ];
    let mut findings = Vec::new();
    for (n, line) in numbered(text) {
        if let Some(word) = banned.iter().find(|word| line.contains(*word)) {
            let text = format!("'{word}' does not belong in the tree");
            findings.push(Finding::new(path, n, text));
        }
    }
    findings
}

/// Lines, files and the theory at their head.
fn lengths(path: &str, text: &str) -> Vec<Finding> {
    if !is_code(path) {
        return Vec::new();
    }
    let mut findings = Vec::new();
    for (n, line) in numbered(text) {
        let columns = line.chars().count();
        let can_be_broken = !line.contains("https://") && !line.trim().starts_with("#[");
        if columns > LINE_COLUMNS_MAX && can_be_broken {
            let text = format!("{columns} columns, at most {LINE_COLUMNS_MAX}");
            findings.push(Finding::new(path, n, text));
        } else if columns > LINE_COLUMNS_NOTE {
            findings.push(Finding::note(path, n, format!("{columns} columns")));
        }
        if line.ends_with([' ', '\t']) {
            findings.push(Finding::new(path, n, "space at the end of the line"));
        }
    }
    let lines = text.lines().count();
    if lines > FILE_LINES_MAX {
        let text = format!("{lines} lines, at most {FILE_LINES_MAX}: split it");
        findings.push(Finding::new(path, 0, text));
    } else if lines > FILE_LINES_NOTE {
        findings.push(Finding::note(path, 0, format!("{lines} lines")));
    }
    let opens = |start: &str| text.starts_with(start);
    let has_theory = match path.rsplit_once('.').map(|(_, end)| end) {
        Some("rs") => opens("//!"),
        Some("c" | "h") => opens("/*") || opens("//"),
        _ => opens("#"),
    };
    if lines > THEORY_LINES && !has_theory {
        findings.push(Finding::new(path, 1, "a long file opens with its theory"));
    }
    findings
}

/// Long functions of Rust, found by the indentation that rustfmt gives them.
fn functions(path: &str, text: &str) -> Vec<Finding> {
    if !path.ends_with(".rs") {
        return Vec::new();
    }
    let mut findings = Vec::new();
    let lines: Vec<&str> = text.lines().collect();
    for (start, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let indent = line.len() - code.len();
        let words = ["pub", "pub(crate)", "pub(super)", "const", "async", "unsafe", "extern"];
        let head = code.split_whitespace().find(|w| !words.contains(w) && !w.starts_with('"'));
        if head != Some("fn") {
            continue;
        }
        let is_end = |l: &&str| l.len() == indent + 1 && l.ends_with('}') && l.trim() == "}";
        let Some(length) = lines[start..].iter().position(is_end) else { continue };
        let length = length + 1;
        if length > FUNCTION_LINES_MAX {
            let text = format!("a function of {length} lines, at most {FUNCTION_LINES_MAX}");
            findings.push(Finding::new(path, start + 1, text));
        } else if length > FUNCTION_LINES_NOTE {
            findings.push(Finding::note(path, start + 1, format!("a function of {length} lines")));
        }
    }
    findings
}

/// The words between backticks of a line of Markdown.
fn quoted(line: &str) -> Vec<&str> {
    line.split('`').skip(1).step_by(2).collect()
}

/// The cells of a row of a Markdown table, or `None` for any other line and for the ruler.
fn cells(line: &str) -> Option<Vec<&str>> {
    let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    let cells: Vec<&str> = inner.split('|').map(str::trim).collect();
    let ruler = cells.iter().all(|c| !c.is_empty() && c.bytes().all(|b| b"-: ".contains(&b)));
    (!ruler).then_some(cells)
}

/// Each row of `SPECIFICATION.md` whose table ends in "held by" names a live test, written
/// `FOLDER/FILE.rs::FUNCTION`, or a benchmark, written `bench NAME`.
fn promises(files: &[(String, String)]) -> Vec<Finding> {
    let path = "SPECIFICATION.md";
    let Some((_, text)) = files.iter().find(|(p, _)| p == path) else { return Vec::new() };
    let mut findings = Vec::new();
    let mut columns = None;
    for (n, line) in numbered(text) {
        let Some(row) = cells(line) else {
            if !line.starts_with('|') {
                columns = None;
            }
            continue;
        };
        let Some(count) = columns else {
            if row.last() != Some(&"held by") {
                findings.push(Finding::new(path, n, "the last column must be 'held by'"));
            }
            columns = Some(row.len());
            continue;
        };
        if row.len() != count {
            findings.push(Finding::new(path, n, "a row of another width than its head"));
        }
        let names = quoted(row.last().copied().unwrap_or(""));
        if names.is_empty() {
            findings.push(Finding::new(path, n, "a promise that nothing holds"));
        }
        let dead = names.into_iter().filter(|name| !is_live(name, files));
        findings.extend(dead.map(|name| Finding::new(path, n, format!("no such test: {name}"))));
    }
    findings
}

fn is_live(name: &str, files: &[(String, String)]) -> bool {
    let text_of = |path: &str| files.iter().find(|(p, _)| p == path).map(|(_, text)| text);
    if let Some(bench) = name.strip_prefix("bench ") {
        return text_of(&format!("benches/src/{bench}.rs")).is_some()
            || text_of(&format!("benches/src/{bench}/mod.rs")).is_some();
    }
    let Some((path, function)) = name.split_once("::") else { return false };
    let function = function.rsplit("::").next().unwrap_or(function);
    text_of(path).is_some_and(|text| {
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        let head = format!("fn {function}(");
        lines.iter().enumerate().any(|(at, line)| {
            line.starts_with(&head)
                && lines[..at].iter().rev().take(4).any(|above| above.starts_with("#[test]"))
        })
    })
}

/// Each line of `tests/guest.txt` is a whole-system test, written `system::FILE::FUNCTION`.
fn guest_tests(files: &[(String, String)]) -> Vec<Finding> {
    let Some((_, text)) = files.iter().find(|(p, _)| p == SMOKE) else { return Vec::new() };
    let is_test = |line: &str| {
        let mut parts = line.split("::").skip(1);
        let file = parts.next().unwrap_or_default();
        let inner = parts.clone().count() > 1;
        // A module of a module is a file of its own beside the others.
        let file = if inner { parts.next().unwrap_or_default() } else { file };
        let function = parts.next().unwrap_or_default();
        // A test of a workload is made by a macro, from a line `NAME: "WORKLOAD";`.
        let of_workload = format!("{function}: \"");
        let text = files.iter().find(|(path, _)| *path == format!("tests/{file}.rs"));
        is_live(&format!("tests/{file}.rs::{function}"), files)
            || text.is_some_and(|(_, t)| t.lines().any(|l| l.trim().starts_with(&of_workload)))
    };
    numbered(text)
        .filter(|(_, line)| !line.starts_with('#') && !is_test(line))
        .map(|(n, line)| Finding::new(SMOKE, n, format!("no such test: {line}")))
        .collect()
}

/// Each row of `docs/kernel-features.md` is a feature that `kernel::probe` tries by that name.
fn features(files: &[(String, String)]) -> Vec<Finding> {
    let path = "docs/kernel-features.md";
    let probe = "crates/kernel/src/probe";
    let probes: Vec<&str> =
        files.iter().filter(|(p, _)| p.starts_with(probe)).map(|(_, text)| text.as_str()).collect();
    let Some((_, text)) = files.iter().find(|(p, _)| p == path) else {
        let missing = Finding::new(path, 0, "missing: the features that `dormouse check` probes");
        return if probes.is_empty() { Vec::new() } else { vec![missing] };
    };
    let mut findings = Vec::new();
    for (n, line) in numbered(text) {
        let Some(row) = cells(line) else { continue };
        let name = row[0].trim_matches(['*', '`']);
        let literal = format!("\"{name}\"");
        if name != "feature" && !probes.iter().any(|text| text.contains(&literal)) {
            findings.push(Finding::new(path, n, format!("'{name}' is not probed")));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(findings: Vec<Finding>) -> Vec<(usize, bool)> {
        findings.into_iter().map(|f| (f.line, f.is_note)).collect()
    }

    #[test]
    fn a_mark_needs_its_issue() {
        let mark = concat!("TO", "DO");
        let text =
            format!("// {mark}: later\n// {mark}(#12): known\n// {mark}(#): x\nMAST{mark}N\n");
        assert_eq!(texts(marks("a.rs", &text)), [(1, false), (3, false)]);
        assert_eq!(texts(marks("a.rs", concat!("// FIX", "ME\n"))), [(1, false)]);
    }

    #[test]
    fn paths_of_the_machine_are_found() {
        assert_eq!(texts(places("a.md", concat!("see /wo", "rk/main\nok\n"))), [(1, false)]);
        assert_eq!(texts(places("a.md", "the workspace works\n")), []);
    }

    #[test]
    fn lines_files_and_theory_have_their_lengths() {
        assert_eq!(texts(lengths("a.rs", &"x".repeat(121))), [(1, false)]);
        assert_eq!(texts(lengths("a.rs", &"x".repeat(101))), [(1, true)]);
        assert_eq!(texts(lengths("a.rs", &"ä".repeat(100))), []);
        assert_eq!(texts(lengths("a.rs", "x \n")), [(1, false)]);
        assert_eq!(texts(lengths("a.md", &"x".repeat(500))), []);
        assert_eq!(texts(lengths("a.rs", &"x\n".repeat(301))), [(1, false)]);
        assert_eq!(texts(lengths("a.rs", &"//! x\n".repeat(301))), []);
        assert_eq!(texts(lengths("a.rs", &"//! x\n".repeat(801))), [(0, true)]);
        assert_eq!(texts(lengths("a.rs", &"//! x\n".repeat(1501))), [(0, false)]);
    }

    #[test]
    fn long_functions_are_found_by_their_indentation() {
        let body = "        x();\n".repeat(79);
        let text = format!("impl A {{\n    pub fn f() {{\n{body}    }}\n    fn g() {{}}\n}}\n");
        assert_eq!(texts(functions("a.rs", &text)), [(2, true)]);
        let text = format!("fn f() {{\n{}}}\n", "    x();\n".repeat(199));
        assert_eq!(texts(functions("a.rs", &text)), [(1, false)]);
    }

    #[test]
    fn unsafe_stays_in_its_rooms() {
        let text = "fn f() {\n    unsafe { x() }\n}\n// unsafe { no }\n";
        assert_eq!(texts(unsafe_code("crates/image/src/a.rs", text)), [(2, false)]);
        assert_eq!(texts(unsafe_code("crates/kernel/src/a.rs", text)), []);
        assert!(forbids_unsafe("a", "//! A.\n#![forbid(unsafe_code)]\n").is_none());
        assert!(forbids_unsafe("a", "//! A.\n#![warn(unsafe_code)]\n").is_some());
    }

    #[test]
    fn a_promise_names_a_live_test() {
        let file = |p: &str, t: &str| (p.to_owned(), t.to_owned());
        let head = "| what | promise | held by |\n|---|---|---|\n";
        let spec = |rows: &str| file("SPECIFICATION.md", &format!("{head}{rows}"));
        let tests = file("tests/a.rs", "#[test]\nfn holds() {}\nfn helper() {}\n");
        let bench = file("benches/src/start.rs", "");
        let found = |rows: &str| texts(promises(&[spec(rows), tests.clone(), bench.clone()]));
        assert_eq!(found("| a | 1 | `tests/a.rs::holds`, `bench start` |\n"), []);
        assert_eq!(found("| a | 1 | `tests/a.rs::gone` |\n"), [(3, false)]);
        assert_eq!(found("| a | 1 | `bench gone` |\n"), [(3, false)]);
        assert_eq!(found("| a | 1 | soon |\n"), [(3, false)]);
        assert_eq!(found("| a | `tests/a.rs::holds` |\n"), [(3, false)]);
    }

    #[test]
    fn guest_list_names_live_tests() {
        let file = |p: &str, t: &str| (p.to_owned(), t.to_owned());
        let tests = file("tests/sleep.rs", "#[test]\nfn vm_wakes() {}\nvm_made: \"made\";\n");
        let list = "# list\nsystem::sleep::vm_wakes\nsystem::sleep::vm_made\nsystem::sleep::vm_gone\n\
                    system::checkpoint::sleep::vm_wakes\n";
        let found = guest_tests(&[tests, file(SMOKE, list)]);
        assert_eq!(texts(found), [(4, false)]);
    }

    #[test]
    fn a_feature_of_the_table_is_probed() {
        let file = |p: &str, t: &str| (p.to_owned(), t.to_owned());
        let probe = file("crates/kernel/src/probe/mod.rs", "probe(\"clone3\", \"5.3\")\n");
        let table = |rows: &str| {
            file("docs/kernel-features.md", &format!("| feature | since |\n|---|---|\n{rows}"))
        };
        let good = table("| **clone3** | 5.3 |\n");
        assert_eq!(texts(features(&[probe.clone(), good])), []);
        let bad = table("| clone3 | 5.3 |\n| time travel | 9.9 |\n");
        assert_eq!(texts(features(&[probe.clone(), bad])), [(4, false)]);
        assert_eq!(texts(features(&[probe])), [(0, false)]);
    }
}
