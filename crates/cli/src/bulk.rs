//! Progress of a verb over many containers.

use indicatif::{ProgressBar, ProgressStyle};

use crate::terminal::is_terminal;

/// LIMIT: below this number no progress is shown.
const MANY: usize = 20;

/// A bar on standard error, if standard error is a terminal and standard output is none. Names are
/// printed on standard output as they are done.
#[derive(Debug)]
pub(crate) struct Bulk(ProgressBar);

impl Bulk {
    pub(crate) fn new(what: &'static str, count: usize) -> Self {
        let seen = is_terminal(rustix::stdio::stderr()) && !is_terminal(rustix::stdio::stdout());
        if !seen || count < MANY {
            return Self(ProgressBar::hidden());
        }
        let style = ProgressStyle::with_template("{msg} {bar:30} {pos}/{len}, {eta} left");
        let bar = ProgressBar::new(count as u64);
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(what);
        Self(bar)
    }

    /// Advances the bar.
    pub(crate) fn done(&self, count: usize) {
        self.0.inc(count as u64);
    }
}

impl Drop for Bulk {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
