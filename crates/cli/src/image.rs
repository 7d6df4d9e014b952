//! Finding the image of a new container, and progress of transfers.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use dormouse_container::Engine;
use dormouse_image::registry::{PullOptions, pull};
use dormouse_image::{Image, Progress, Silent};
use dormouse_kernel::ErrorKind;
use dormouse_model::Reference;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// Finds the image `name`; `when` (`missing`, `always`, `newer`, `never`) decides whether a
/// registry is used.
pub(crate) fn resolve(engine: &Engine, name: &str, when: &str, quiet: bool) -> Result<Image> {
    let store = engine.images()?;
    if when != "always" && when != "newer" {
        match store.find(name) {
            Err(e) if e.kind() == ErrorKind::NotFound && when != "never" => {}
            Err(e) if e.kind() == ErrorKind::NotFound => {
                bail!("no image is called '{name}': pull or import it first")
            }
            found => return Ok(found?),
        }
    }
    let reference: Reference = name.parse()?;
    let access = crate::registry::access(engine.places().etc.clone());
    let id = fetch(engine, &reference, &PullOptions { access, platform: None }, quiet)?;
    Ok(store.find(&id)?)
}

/// Fetches an image from its registry; returns its id.
pub(crate) fn fetch(
    engine: &Engine,
    reference: &Reference,
    options: &PullOptions,
    quiet: bool,
) -> Result<String> {
    let progress = progress(quiet);
    let id = pull(engine.images()?, reference, options, &*progress)
        .with_context(|| format!("cannot pull '{reference}'"))?;
    engine.record(dormouse_api::EventKind::Pull, &id, &reference.to_string(), &[]);
    Ok(id)
}

/// Returns progress bars on stderr if that is a terminal and `quiet` is not set.
pub(crate) fn progress(quiet: bool) -> Box<dyn Progress> {
    if quiet || !crate::terminal::is_terminal(rustix::stdio::stderr()) {
        Box::new(Silent)
    } else {
        Box::new(Bars::default())
    }
}

/// A bar per task.
#[derive(Debug, Default)]
struct Bars {
    next: AtomicU64,
    all: MultiProgress,
    bars: Mutex<BTreeMap<u64, ProgressBar>>,
}

impl Progress for Bars {
    fn start(&self, what: &str, total_bytes: Option<u64>) -> u64 {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (bar, template) = match total_bytes {
            Some(total) => (
                ProgressBar::new(total),
                "{msg:36!} {bar:30} {decimal_bytes:>10}/{decimal_total_bytes} {decimal_bytes_per_sec}",
            ),
            None => (ProgressBar::no_length(), "{msg:36!} {spinner} {decimal_bytes:>10}"),
        };
        let style = ProgressStyle::with_template(template);
        let bar = bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(crate::output::printable(what).into_owned());
        let bar = self.all.add(bar);
        if let Ok(mut bars) = self.bars.lock() {
            bars.insert(id, bar);
        }
        id
    }

    fn advance(&self, id: u64, bytes: u64) {
        if let Some(bar) = self.bars.lock().ok().as_deref().and_then(|b| b.get(&id)) {
            bar.inc(bytes);
        }
    }

    fn finish(&self, id: u64) {
        let bar = self.bars.lock().ok().and_then(|mut b| b.remove(&id));
        if let Some(bar) = bar {
            bar.finish_and_clear();
            self.all.remove(&bar);
        }
    }
}
