//! Unique names, by renameat2(2).
//!
//! `LIB/names/NAME` holds the id of the container that has the name. The file is written under
//! another name and renamed, which fails if the name exists (RENAME_NOREPLACE; link(2) where the file system lacks it).
//! Two creates with one name therefore cannot both succeed, and a reader never finds half an id.

use std::fs::{self, File};
use std::io::{ErrorKind as Io, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use dormouse_model::{ContainerId, Name};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::disk::FILE_MODE;
use crate::error::{Error, Result};

/// The directory of names.
#[derive(Debug)]
pub(crate) struct Names {
    dir: PathBuf,
}

impl Names {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    fn path(&self, name: &Name) -> PathBuf {
        self.dir.join(name.as_str())
    }

    /// The temporary file that becomes a name.
    fn new_path(&self, id: &ContainerId) -> PathBuf {
        self.dir.join(format!(".{id}"))
    }

    /// Returns the container that has this name.
    pub(crate) fn holder(&self, name: &Name) -> Result<Option<ContainerId>> {
        let path = self.path(name);
        match fs::read_to_string(&path) {
            Ok(text) => text
                .parse()
                .map(Some)
                .map_err(|_| Error::Corrupt { path, what: "it holds no container id".into() }),
            Err(e) if e.kind() == Io::NotFound => Ok(None),
            Err(e) => Err(Error::file("cannot read", path)(e)),
        }
    }

    /// Gives a free name to a container. If the name is taken, the error has its holder.
    pub(crate) fn take(&self, name: &Name, id: &ContainerId) -> Result<()> {
        let new = self.new_path(id);
        let write = || {
            let mut options = File::options();
            let options = options.write(true).create(true).truncate(true).mode(FILE_MODE);
            options.open(&new)?.write_all(id.as_str().as_bytes())
        };
        write().map_err(Error::file("cannot write", &new))?;
        let path = self.path(name);
        let placed = match renameat_with(CWD, &new, CWD, &path, RenameFlags::NOREPLACE) {
            Err(Errno::INVAL) => {
                let linked = fs::hard_link(&new, &path);
                let _ = fs::remove_file(&new); // on failure `release` removes it
                linked
            }
            placed => placed.map_err(Into::into),
        };
        match placed {
            Ok(()) => Ok(()),
            Err(e) if e.kind() == Io::AlreadyExists => {
                let _ = fs::remove_file(&new); // likewise
                let holder = self.holder(name)?.map(|h| h.short().to_owned());
                Err(Error::NameTaken {
                    name: name.to_string(),
                    holder: holder.unwrap_or_else(|| "that is being removed".into()),
                })
            }
            Err(e) => {
                let _ = fs::remove_file(&new); // likewise
                Err(Error::file("cannot take the name", path)(e))
            }
        }
    }

    /// Releases a name, if this container has it.
    pub(crate) fn release(&self, name: &Name, id: &ContainerId) -> Result<()> {
        let _ = fs::remove_file(self.new_path(id)); // left by a killed `take`
        if self.holder(name)?.as_ref() != Some(id) {
            return Ok(());
        }
        match fs::remove_file(self.path(name)) {
            Err(e) if e.kind() != Io::NotFound => {
                Err(Error::file("cannot give back the name", self.path(name))(e))
            }
            _ => Ok(()),
        }
    }

    /// Releases all names of a container: one, two during a rename, and the temporary file.
    pub(crate) fn release_all(&self, id: &ContainerId) -> Result<()> {
        let _ = fs::remove_file(self.new_path(id)); // left by a killed `take`
        let all = self.all()?;
        all.iter().filter(|(_, holder)| holder == id).try_for_each(|(n, _)| self.release(n, id))
    }

    /// Returns every name with its holder; entries that are no names are left out.
    pub(crate) fn all(&self) -> Result<Vec<(Name, ContainerId)>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(Error::file("cannot list", &self.dir))? {
            let entry = entry.map_err(Error::file("cannot list", &self.dir))?;
            let Some(name) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else {
                continue;
            };
            if let Some(holder) = self.holder(&name)? {
                all.push((name, holder));
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_is_released_only_by_its_holder() {
        let dir = tempfile::tempdir().unwrap();
        let names = Names::new(dir.path().into());
        let (a, b) = (ContainerId::from_bytes([1; 16]), ContainerId::from_bytes([2; 16]));
        let web: Name = "web".parse().unwrap();
        names.take(&web, &a).unwrap();
        let e = names.take(&web, &b).unwrap_err();
        assert!(e.to_string().contains(a.short()), "{e}");
        names.release(&web, &b).unwrap();
        assert_eq!(names.holder(&web).unwrap(), Some(a.clone()));
        names.release(&web, &a).unwrap();
        assert_eq!(names.holder(&web).unwrap(), None);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
