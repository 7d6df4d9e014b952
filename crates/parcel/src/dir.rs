//! A checkpoint as a directory: written next to its place, and renamed when it is complete.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use dormouse_record::{Error, Of, PAGE_BYTES, Pages, Records, Result};

use crate::append::Appender;
use crate::base::Base;
use crate::part::part_name;
use crate::section::{SECTION_BYTES_MAX, encode};
use crate::sink::Sink;

/// A checkpoint that is being written. If it is dropped before [`Sink::publish`], it is removed.
#[derive(Debug)]
pub struct DirSink {
    place: PathBuf,
    partial: PathBuf,
    /// Appended pages.
    pages: Appender,
    /// The base, with the pages before them.
    base: Option<Base>,
    /// Bytes that were found in the base.
    found_bytes: u64,
}

impl DirSink {
    /// Starts a checkpoint that will be the directory `place`, which must not exist.
    pub fn begin(place: &Path) -> Result<Self> {
        Self::begin_upon(place, None)
    }

    /// The same, upon a base: its pages need not be written again. If its files cannot be linked,
    /// for example from another file system, all pages are written.
    pub fn begin_upon(place: &Path, base: Option<Base>) -> Result<Self> {
        if place.exists() {
            let exists = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
            return Err(Error::file("cannot make the checkpoint", place)(exists));
        }
        let mut name = std::ffi::OsString::from(".new-");
        name.push(place.file_name().unwrap_or_default());
        let partial = place.with_file_name(name);
        // The rest of a killed writer. No other process writes here: callers hold a lock.
        let _ = fs::remove_dir_all(&partial);
        DirBuilder::new()
            .mode(0o700)
            .create(&partial)
            .map_err(Error::file("cannot make directory", &partial))?;
        let base = base.filter(|base| base.link_into(&partial));
        let path = partial.join(part_name(base.as_ref().map_or(0, Base::parts)));
        let pages = Appender::new(path.clone(), create(&path)?);
        Ok(Self { place: place.to_owned(), partial, pages, base, found_bytes: 0 })
    }
}

impl Sink for DirSink {
    fn next_page(&self) -> u64 {
        (self.base.as_ref().map_or(0, Base::end) + self.pages.bytes()) / PAGE_BYTES
    }

    fn new_bytes(&self) -> u64 {
        self.pages.bytes()
    }

    fn bytes(&self) -> u64 {
        self.pages.bytes() + self.found_bytes
    }

    fn find(&mut self, of: Of, address: u64, page: &[u8]) -> Option<u64> {
        let found = self.base.as_mut()?.find(of, address, page)?;
        self.found_bytes += PAGE_BYTES;
        Some(found)
    }

    fn append(&mut self, pages: &[u8]) -> Result<()> {
        self.pages.append(pages)
    }

    fn make_room(&mut self, bytes: u64) {
        self.pages.make_room(bytes);
    }

    fn pages(&mut self) -> Result<Pages> {
        let own = self.pages.pages()?;
        Ok(match &self.base {
            Some(base) => base.followed_by(own),
            None => own,
        })
    }

    // ORDER: records and pages are durable before the directory has its name.
    fn publish(mut self: Box<Self>, records: &Records) -> Result<()> {
        let path = self.partial.join("records");
        let bytes = encode(records);
        // LIMIT: a longer section would not be read.
        if bytes.len() as u64 > SECTION_BYTES_MAX {
            let why = std::io::ErrorKind::FileTooLarge.into();
            return Err(Error::file("cannot write", path)(why));
        }
        let mut file = create(&path)?;
        file.write_all(&bytes).map_err(Error::file("cannot write", &path))?;
        file.sync_all().map_err(Error::file("cannot write", &path))?;
        self.pages.make_durable()?;
        if let (Some(base), 0) = (&self.base, self.pages.bytes()) {
            let path = self.partial.join(part_name(base.parts()));
            fs::remove_file(&path).map_err(Error::file("cannot remove", &path))?;
        }
        let sync = |dir: &Path| {
            File::open(dir)
                .and_then(|dir| dir.sync_all())
                .map_err(Error::file("cannot make durable", dir))
        };
        sync(&self.partial)?;
        fs::rename(&self.partial, &self.place)
            .map_err(Error::file("cannot publish the checkpoint", &self.place))?;
        let parent = self.place.parent().filter(|p| !p.as_os_str().is_empty());
        sync(parent.unwrap_or(Path::new(".")))
    }
}

impl Drop for DirSink {
    fn drop(&mut self) {
        // After publication the directory has another name, and nothing is removed.
        let _ = fs::remove_dir_all(&self.partial);
    }
}

fn create(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    let opened = options.write(true).create_new(true).mode(0o600).open(path);
    opened.map_err(Error::file("cannot make", path))
}
