//! The language of the tree, counted: words for people where a thing is meant, verbs of speech, sentences
//! that open with a pronoun; and the form of commit subjects.
//!
//! Counted are comments of Rust and C, and paragraphs of Markdown without code and tables. A sentence of
//! fewer than four words is no sentence. The limits hold for all files of a kind together, so that a
//! quotation or a real person costs nothing.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

/// Occurrences per 1,000 words at most.
const PER_THOUSAND_MAX: f64 = 2.0;
/// Sentences that open with a pronoun, in percent at most.
const OPENINGS_MAX: f64 = 6.5;
/// Files that a finding names.
const WORST: usize = 5;

const PEOPLE: &[&str] = &[
    "who",
    "whom",
    "whose",
    "whoever",
    "nobody",
    "somebody",
    "anybody",
    "everybody",
    "someone",
    "anyone",
    "everyone",
];
const SPEECH: &[&str] = &[
    "say", "says", "said", "saying", "tell", "tells", "told", "telling", "ask", "asks", "asked",
    "asking", "hear", "hears", "heard",
];
const PRONOUNS: &[&str] = &[
    "it", "they", "this", "that", "these", "those", "what", "whoever", "who", "he", "nobody",
    "somebody",
];

/// What is counted of a file, or of all.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Count {
    words: usize,
    people: usize,
    speech: usize,
    sentences: usize,
    openings: usize,
}

impl Count {
    fn add(&mut self, other: Self) {
        self.words += other.words;
        self.people += other.people;
        self.speech += other.speech;
        self.sentences += other.sentences;
        self.openings += other.openings;
    }

    /// People and speech per 1,000 words, openings in percent.
    fn rates(self) -> [f64; 3] {
        let rate = |part: usize, whole: usize, of: f64| of * part as f64 / whole.max(1) as f64;
        [
            rate(self.people, self.words, 1000.0),
            rate(self.speech, self.words, 1000.0),
            rate(self.openings, self.sentences, 100.0),
        ]
    }
}

/// The counts of one kind of file, as one line, and what is wrong with them.
pub struct Judgement {
    /// For the reader of every run.
    pub line: String,
    /// Limits that are passed, each with the worst files.
    pub complaints: Vec<String>,
}

/// Judges comments and documents.
pub fn judge(files: &[(String, String)]) -> [Judgement; 2] {
    let ends = |path: &str, ends: &[&str]| ends.iter().any(|end| path.ends_with(end));
    let of = |kind: &str, is_of: &dyn Fn(&str) -> bool, texts: &dyn Fn(&str) -> Vec<String>| {
        let counts: Vec<(&str, Count)> = files
            .iter()
            .filter(|(path, _)| is_of(path))
            .map(|(path, text)| (path.as_str(), count(&texts(text))))
            .collect();
        conclude(kind, &counts)
    };
    [
        of("comments", &|path| ends(path, &[".rs", ".c", ".h"]), &comments),
        of("documents", &|path| ends(path, &[".md"]), &paragraphs),
    ]
}

fn conclude(kind: &str, counts: &[(&str, Count)]) -> Judgement {
    let mut all = Count::default();
    counts.iter().for_each(|(_, count)| all.add(*count));
    let [people, speech, openings] = all.rates();
    let line = format!(
        "{kind}: {} words; per 1,000: who-words {people:.1}, speech verbs {speech:.1}; sentences opening \
         with a pronoun {openings:.1} %",
        all.words
    );
    type Part = fn(&Count) -> usize;
    let limits: [(&str, f64, f64, Part); 3] = [
        ("words for people per 1,000", people, PER_THOUSAND_MAX, |count| count.people),
        ("verbs of speech per 1,000", speech, PER_THOUSAND_MAX, |count| count.speech),
        ("percent of sentences open with a pronoun", openings, OPENINGS_MAX, |count| {
            count.openings
        }),
    ];
    let mut complaints = Vec::new();
    for (name, rate, max, part) in limits {
        if rate > max {
            let mut worst: Vec<_> =
                counts.iter().map(|(path, count)| (part(count), *path)).collect();
            worst.sort_unstable_by(|a, b| b.cmp(a));
            let worst: Vec<String> =
                worst.iter().take(WORST).map(|(n, path)| format!("{path} {n}")).collect();
            let worst = worst.join(", ");
            complaints.push(format!("{kind}: {rate:.1} {name}, at most {max}: {worst}"));
        }
    }
    Judgement { line, complaints }
}

/// The comments of a file; neighbouring lines are one text.
fn comments(text: &str) -> Vec<String> {
    let mut texts = Vec::new();
    let mut run: Vec<&str> = Vec::new();
    for line in text.lines() {
        match comment(line) {
            Some(words) => run.push(words),
            None if run.is_empty() => {}
            None => texts.push(std::mem::take(&mut run).join(" ")),
        }
    }
    texts.push(run.join(" "));
    texts
}

/// The words of a line that is a comment.
fn comment(line: &str) -> Option<&str> {
    let line = line.trim_start();
    if let Some(rest) = line.strip_prefix("//") {
        return Some(rest.strip_prefix(['/', '!']).unwrap_or(rest).trim_start());
    }
    if line.starts_with("*/") {
        return None;
    }
    let rest = line.strip_prefix('/').filter(|rest| rest.starts_with('*')).unwrap_or(line);
    rest.starts_with('*').then(|| rest.trim_start_matches('*').trim_start())
}

/// The paragraphs of a Markdown text, without code and tables.
fn paragraphs(text: &str) -> Vec<String> {
    let mut texts = vec![String::new()];
    let mut in_code = false;
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed.starts_with("```") {
            in_code = !in_code;
            continue;
        }
        if in_code || trimmed.starts_with('|') {
            continue;
        }
        if trimmed.is_empty() {
            texts.push(String::new());
        } else if let Some(last) = texts.last_mut() {
            last.push_str(trimmed);
            last.push(' ');
        }
    }
    texts
}

fn count(texts: &[String]) -> Count {
    let mut count = Count::default();
    for text in texts {
        // Code between backticks is one word.
        let plain: Vec<&str> = text
            .split('`')
            .enumerate()
            .map(|(i, part)| if i % 2 == 0 { part } else { "X" })
            .collect();
        let plain = plain.concat();
        for word in words(&plain) {
            let word = word.to_ascii_lowercase();
            let word = word.strip_suffix("'s").unwrap_or(&word);
            count.words += 1;
            count.people += usize::from(PEOPLE.contains(&word));
            count.speech += usize::from(SPEECH.contains(&word));
        }
        for sentence in sentences(&plain) {
            let first: Vec<&str> = words(sentence).take(4).collect();
            if let [first, _, _, _] = first[..] {
                count.sentences += 1;
                let is_pronoun = PRONOUNS.contains(&first.to_ascii_lowercase().as_str());
                count.openings += usize::from(is_pronoun);
            }
        }
    }
    count
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphabetic() && c != '\'').filter(|word| !word.is_empty())
}

/// Splits after a full stop, question mark, exclamation mark or colon before a capital letter.
fn sentences(text: &str) -> Vec<&str> {
    let bytes = text.as_bytes();
    let mut parts = Vec::new();
    let mut from = 0;
    for at in 1..bytes.len() {
        if !bytes[at].is_ascii_uppercase() || !bytes[at - 1].is_ascii_whitespace() {
            continue;
        }
        let before = text[..at].trim_end();
        if before.len() > from && before.ends_with(['.', '!', '?', ':']) {
            parts.push(&text[from..before.len()]);
            from = at;
        }
    }
    parts.push(&text[from..]);
    parts
}

/// The last commit before subjects had a form.
const FORM_SINCE: &str = "3671fcc4a57b29b369756f0b92af433139dde6a1";
/// Columns of a subject at most.
const SUBJECT_MAX: usize = 72;

/// Complaints about commits since [`FORM_SINCE`]; none where the history is not there.
pub fn commits(top: &Path) -> Result<Vec<String>> {
    let range = format!("{FORM_SINCE}..HEAD");
    let log = Command::new("git")
        .args(["log", "--no-merges", "--format=%h%x01%s%x01%b%x02", &range])
        .current_dir(top)
        .output()
        .context("starting git")?;
    if !log.status.success() {
        return Ok(Vec::new());
    }
    let log = String::from_utf8_lossy(&log.stdout).into_owned();
    Ok(log.split('\x02').filter_map(|entry| form(entry.trim())).collect())
}

/// What is wrong with the form of one commit: `area: verb ...`, its length, its body.
fn form(entry: &str) -> Option<String> {
    let mut parts = entry.splitn(3, '\x01');
    let (hash, subject) = (parts.next()?, parts.next()?);
    let body = parts.next().unwrap_or("");
    let area = subject.split_once(": ");
    let is_area =
        |area: &str| area.chars().all(|c| c.is_ascii_alphanumeric() || "/._,- ".contains(c));
    let mut wrong = Vec::new();
    if subject.chars().count() > SUBJECT_MAX {
        wrong.push(format!("{} columns, at most {SUBJECT_MAX}", subject.chars().count()));
    }
    if !area.is_some_and(|(area, rest)| {
        is_area(area) && rest.starts_with(|c: char| c.is_ascii_lowercase())
    }) {
        wrong.push("not 'area: imperative verb ...'".to_owned());
    }
    if body.trim().len() < 20 && !subject.starts_with("docs:") {
        wrong.push("no body that gives the reason".to_owned());
    }
    (!wrong.is_empty()).then(|| format!("commit {hash} '{subject}': {}", wrong.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> (String, String) {
        (path.to_owned(), text.to_owned())
    }

    #[test]
    fn people_speech_and_openings_are_counted() {
        let text = "/// Whoever calls is told by the keeper. It waits for the end.\n\
                    fn a() {} // this is not counted\n\
                    // The socket `who` stays open. That is good and short.\n";
        let count = count(&comments(text));
        assert_eq!((count.people, count.speech), (1, 1));
        assert_eq!((count.sentences, count.openings), (4, 3));
    }

    #[test]
    fn markdown_without_code_and_tables_is_counted() {
        let text = "# A title here\n\n```sh\nwho said\n```\n\n| who | said |\n\nNobody was told about the \
                    socket.\n";
        let count = count(&paragraphs(text));
        assert_eq!((count.people, count.speech, count.openings), (1, 1, 1));
    }

    #[test]
    fn limits_are_enforced_over_all_files_of_a_kind() {
        let plain = "// The keeper reaps the process and records its status.\n".repeat(200);
        let bad = "// Somebody says it to whoever asks.\n".repeat(30);
        let [code, docs] = judge(&[file("a.rs", &plain), file("b.md", "The keeper reaps it.\n")]);
        assert!(code.complaints.is_empty() && docs.complaints.is_empty(), "{:?}", code.complaints);
        let [code, _] = judge(&[file("a.rs", &plain), file("b.rs", &bad)]);
        assert_eq!(code.complaints.len(), 3, "{:?}", code.complaints);
        assert!(code.complaints[0].contains("b.rs 60"), "{:?}", code.complaints);
    }

    #[test]
    fn commit_has_an_area_a_short_subject_and_a_body() {
        let good = "abc\x01kernel: read the pid from the pidfd\x01Because a number can be reused.";
        assert_eq!(form(good), None);
        assert_eq!(form("abc\x01docs: name the units\x01"), None);
        let long = "y".repeat(70);
        for bad in [
            "abc\x01Fix things\x01A body that is long enough.",
            "abc\x01kernel: Read it\x01A body that is long enough.",
            "abc\x01kernel: read it\x01",
            &format!("abc\x01kernel: {long}\x01A body that is long enough."),
        ] {
            assert!(form(bad).is_some(), "{bad}");
        }
    }
}
