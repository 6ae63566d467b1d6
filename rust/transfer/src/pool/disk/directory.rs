//! A directory of real files.

use std::collections::HashMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, IoSlice, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use nix::fcntl::{FallocateFlags, Flock, FlockArg, OFlag, fallocate};
use nix::sys::uio::pwritev;

use crate::error::Error;

use super::format::{Invalid, Store, decode_store, encode_store};
use super::io::{FileId, Medium};

/// A locked directory.
pub struct Directory {
    path: PathBuf,
    store: Store,
    files: Mutex<HashMap<FileId, Arc<File>>>,
    /// Another daemon gets in when this is dropped.
    _lock: Flock<File>,
}

fn refuse(path: &Path, what: &str, error: &io::Error) -> Error {
    Error::give_up(format!("the SSD directory {}: {what}: {error}", path.display()))
}

impl Directory {
    /// Opens it, or makes it.
    ///
    /// # Errors
    /// Give up: others may enter it, another daemon uses it, a newer version wrote it, it is not writable.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let mut private = DirBuilder::new();
        private.recursive(true).mode(0o700);
        private.create(path).map_err(|error| refuse(path, "it cannot be made", &error))?;
        let mode = path.metadata().map_err(|error| refuse(path, "it cannot be looked at", &error))?.mode();
        if mode & 0o077 != 0 {
            return Err(Error::give_up(format!(
                "the SSD directory {} may be entered by others (mode {:o}), who could read and change what users said: \
                 chmod 700 it, or name another",
                path.display(),
                mode & 0o7777
            )));
        }
        let open =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path.join("lock"));
        let lock = open.map_err(|error| refuse(path, "it is not writable", &error))?;
        let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
            nix::errno::Errno::EWOULDBLOCK => Error::give_up(format!(
                "the SSD directory {} is used by another daemon: stop it, or give each its own",
                path.display()
            )),
            errno => refuse(path, "it cannot be locked", &errno.into()),
        })?;
        private.create(path.join("segments")).map_err(|error| refuse(path, "segments cannot be made in it", &error))?;
        let store = Self::read_or_make_format(path)?;
        Ok(Self { path: path.to_owned(), store, files: Mutex::default(), _lock: lock })
    }

    fn read_or_make_format(path: &Path) -> Result<Store, Error> {
        let file = path.join("format");
        match std::fs::read(&file) {
            Ok(page) => decode_store(&page).map_err(|invalid| match invalid {
                Invalid::Version(version) => Error::give_up(format!(
                    "the SSD directory {} was written in format {version}, and this daemon knows {}: run the newer daemon, \
                     or empty the directory",
                    path.display(),
                    super::format::VERSION
                )),
                Invalid::Bytes => Error::give_up(format!(
                    "{} is damaged or no file of pyengine's: empty the directory to start anew (it is a cache), or name another",
                    file.display()
                )),
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let created = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
                let store = Store { store: random()?, created };
                // By another name first, so that what is there is always whole.
                let half = path.join("format.new");
                let write = || {
                    let mut options = OpenOptions::new();
                    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&half)?;
                    file.write_all(encode_store(store).bytes())?;
                    file.sync_all()?;
                    std::fs::rename(&half, path.join("format"))?;
                    File::open(path)?.sync_all()
                };
                write().map_err(|error| refuse(path, "its format cannot be written", &error))?;
                Ok(store)
            }
            Err(error) => Err(refuse(path, "its format cannot be read", &error)),
        }
    }

    fn path_of(&self, file: FileId) -> PathBuf {
        self.path.join("segments").join(format!("{file:04x}.seg"))
    }

    fn file(&self, file: FileId) -> io::Result<Arc<File>> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = files.get(&file) {
            return Ok(file.clone());
        }
        let opened = Arc::new(open(&self.path_of(file), false)?);
        files.insert(file, opened.clone());
        Ok(opened)
    }

    fn sync_names(&self) -> io::Result<()> {
        File::open(self.path.join("segments"))?.sync_all()
    }
}

/// Past the page cache, where the file system can: the arena is the cache.
fn open(path: &Path, create: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(create).mode(0o600);
    match options.custom_flags(OFlag::O_DIRECT.bits()).open(path) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => options.custom_flags(0).open(path),
        other => other,
    }
}

/// 64 random bits.
pub fn random() -> Result<u64, Error> {
    getrandom::u64().map_err(|error| Error::give_up(format!("the system has no random numbers: {error}")))
}

/// The number of a segment file's name.
fn number_of(name: &str) -> Option<FileId> {
    let digits = name.strip_suffix(".seg")?;
    let number = FileId::from_str_radix(digits, 16).ok()?;
    (format!("{number:04x}") == digits).then_some(number)
}

impl Medium for Directory {
    fn list(&self) -> io::Result<Vec<(FileId, u64)>> {
        let (mut files, mut alien) = (Vec::new(), Vec::new());
        for entry in std::fs::read_dir(self.path.join("segments"))? {
            let entry = entry?;
            match number_of(&entry.file_name().to_string_lossy()) {
                Some(number) if entry.file_type()?.is_file() => files.push((number, entry.metadata()?.len())),
                _ => alien.push(entry.path()),
            }
        }
        for path in alien {
            tracing::warn!("{} is no segment: it is left alone and counted in nothing", path.display());
        }
        Ok(files)
    }

    fn allocate(&self, file: FileId, bytes: u64) -> io::Result<()> {
        let path = self.path_of(file);
        let created = !path.exists();
        let opened = if created {
            let opened = Arc::new(open(&path, true)?);
            self.files.lock().unwrap_or_else(PoisonError::into_inner).insert(file, opened.clone());
            opened
        } else {
            self.file(file)?
        };
        let old = opened.metadata()?.len();
        if old > bytes {
            opened.set_len(bytes)?;
        } else if old < bytes {
            match fallocate(opened.as_fd(), FallocateFlags::empty(), 0, bytes as i64) {
                // No room is kept then, and a full disk shows when a segment is written.
                Err(nix::errno::Errno::EOPNOTSUPP) => opened.set_len(bytes)?,
                other => other?,
            }
        }
        if old != bytes {
            opened.sync_all()?;
        }
        if created { self.sync_names() } else { Ok(()) }
    }

    fn remove(&self, file: FileId) -> io::Result<()> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner).remove(&file);
        std::fs::remove_file(self.path_of(file))?;
        self.sync_names()
    }

    fn read(&self, file: FileId, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.file(file)?.read_exact_at(into, offset)
    }

    fn write(&self, file: FileId, mut offset: u64, parts: &mut [IoSlice<'_>]) -> io::Result<()> {
        let file = self.file(file)?;
        let mut rest = parts;
        while !rest.is_empty() {
            let some = rest.len().min(PARTS);
            let written = match pwritev(&*file, &rest[..some], offset as i64) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Err(nix::errno::Errno::EINTR) => continue,
                other => other?,
            };
            offset += written as u64;
            IoSlice::advance_slices(&mut rest, written);
        }
        Ok(())
    }

    fn sync(&self, file: FileId) -> io::Result<()> {
        self.file(file)?.sync_data()
    }

    fn store(&self) -> u64 {
        self.store.store
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn descriptor(&self, file: FileId) -> Option<io::Result<Arc<File>>> {
        Some(self.file(file))
    }
}

/// Parts that one call takes (IOV_MAX).
const PARTS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    // Goal: only our own names are taken for segments. Method: names.
    #[test]
    fn names() {
        assert_eq!(number_of("001f.seg"), Some(0x1f));
        for alien in ["1f.seg", "001F.seg", "+01f.seg", "001f", "001f.seg.bak", "fffff.seg", "lost+found"] {
            assert_eq!(number_of(alien), None, "{alien}");
        }
    }
}
