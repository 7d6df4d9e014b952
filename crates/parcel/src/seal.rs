//! An encrypted archive, which only its recipients can read: the format of age
//! (<https://age-encryption.org/v1>) around everything else.
//!
//! ```text
//! head     lines: version; for each recipient the file key, encrypted for the recipient; a MAC
//! nonce    16 bytes
//! chunks   64 KiB each, encrypted and authenticated (ChaCha20-Poly1305) under key, nonce and
//!          number; the last one is marked as the last
//! ```
//!
//! `age -d` turns it into an ordinary archive ([`crate::archive`]), and the output of `age -r` for
//! an archive is read here. One chunk is in memory at a time.
//!
//! **No byte is used before its check.** All bytes of a chunk are authenticated before any is
//! returned, and so is the chunk's position. A stream without its last chunk is refused at its end,
//! even between two chunks, and so is a stream with data after the last chunk. For that the reader
//! must read to the end; [`crate::archive::ArchiveReader::end`] does, before anything is published.
//!
//! **The sender is not authenticated.** A recipient's public key is enough to make an archive for
//! it. So the contents are as untrusted as any archive, and an archive without encryption is read
//! as well.
//!
//! **A hostile head** is cut off at [`HEAD_BYTES_MAX`] and [`HEAD_LINES_MAX`], which bounds the
//! parser's input and the number of tried keys. The work on a passphrase is limited by
//! [`WORK_MAX`].

use std::fmt;
use std::io::{self, BufRead, BufReader, Chain, Cursor, Read, Write};
use std::iter;
use std::str::FromStr;

use age::secrecy::SecretString;
use age::stream::{StreamReader, StreamWriter};
use age::{DecryptError, Decryptor, Encryptor, IdentityFile, scrypt, x25519};
use dormouse_model::Invalid;
use dormouse_record::{Error, Result};

use crate::archive::ARCHIVE;

/// The first bytes of every version of the format, and those of the version that is read here.
const MAGIC: &[u8] = b"age-encryption.org/";
const HEAD: &[u8] = b"age-encryption.org/v1\n";
/// The first bytes of the text form (`age --armor`), as far as they are examined.
const ARMOR: &[u8] = b"-----BEGIN AGE ENCR";
/// The first bytes of the line that ends the head.
const HEAD_END: &[u8] = b"---";
const NONCE_BYTES: usize = 16;
/// LIMIT: bytes of the head, and lines: the parser starts again with each line.
const HEAD_BYTES_MAX: usize = 32 << 10;
const HEAD_LINES_MAX: usize = 1024;
/// LIMIT: recipients of one archive, so that its head (100 bytes for each) stays within the limit
/// of bytes.
const RECIPIENTS_MAX: usize = 256;
/// Work on a passphrase: scrypt with N = 2^18, which takes 256 MiB and about a second.
const WORK: u8 = 18;
/// LIMIT: work that an archive may require: 1 GiB, and some seconds.
const WORK_MAX: u8 = 20;
/// The name of an encrypted archive in messages.
const SEALED: &str = "the encrypted archive";

/// The public key of a recipient: `age1...`, in the form that `age-keygen` prints.
#[derive(Debug, Clone)]
pub struct Recipient(x25519::Recipient);

impl FromStr for Recipient {
    type Err = Invalid;

    fn from_str(text: &str) -> std::result::Result<Self, Invalid> {
        // A secret key must not appear in a message.
        let is_secret = text.to_ascii_uppercase().starts_with("AGE-SECRET-KEY-");
        let shown = if is_secret { "AGE-SECRET-KEY-..." } else { text };
        let expected = "age1 and 58 letters and digits, as age-keygen prints it";
        text.parse().map(Self).map_err(|_| Invalid::new("recipient", shown, expected))
    }
}

impl Recipient {
    /// Reads a list with one recipient per line; empty lines and lines that begin with `#` are
    /// skipped.
    pub fn read_list(text: &str) -> std::result::Result<Vec<Self>, Invalid> {
        let lines = text.lines().map(str::trim);
        lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::parse).collect()
    }
}

/// The recipients or the passphrase of an encrypted archive.
pub struct Seal(For);

enum For {
    Recipients(Vec<Recipient>),
    Passphrase(SecretString),
}

impl Seal {
    /// For each of `recipients`; any one of them can open the archive.
    pub fn of_recipients(recipients: Vec<Recipient>) -> Result<Self> {
        match recipients.len() {
            0 => Err(Error::Seal("it has no recipient".into())),
            1..=RECIPIENTS_MAX => Ok(Self(For::Recipients(recipients))),
            n => Err(Error::Seal(format!("{n} recipients are more than {RECIPIENTS_MAX}"))),
        }
    }

    /// For all that have the passphrase.
    pub fn of_passphrase(passphrase: String) -> Self {
        Self(For::Passphrase(passphrase.into()))
    }

    /// Starts an encrypted stream into `out`.
    pub fn around<W: Write>(&self, out: W) -> io::Result<Sealed<W>> {
        let encryptor = match &self.0 {
            For::Recipients(all) => {
                Encryptor::with_recipients(all.iter().map(|one| &one.0 as &dyn age::Recipient))
            }
            For::Passphrase(passphrase) => {
                let mut recipient = scrypt::Recipient::new(passphrase.clone());
                recipient.set_work_factor(WORK);
                Encryptor::with_recipients(iter::once(&recipient as &dyn age::Recipient))
            }
        };
        let stream = encryptor.map_err(io::Error::other)?.wrap_output(out)?;
        Ok(Sealed(stream))
    }
}

impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            For::Recipients(all) => f.debug_tuple("Seal").field(all).finish(),
            For::Passphrase(_) => f.write_str("Seal(passphrase)"),
        }
    }
}

/// An encrypted stream that is being written. It ends with [`Sealed::finish`]; a stream that is
/// dropped instead is invalid to a reader.
pub struct Sealed<W: Write>(StreamWriter<W>);

impl<W: Write> Sealed<W> {
    /// Writes the last chunk; returns the writer of [`Seal::around`].
    pub fn finish(self) -> io::Result<W> {
        let mut out = self.0.finish()?;
        out.flush()?;
        Ok(out)
    }
}

impl<W: Write> Write for Sealed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Keys for encrypted archives.
#[derive(Default)]
pub struct Keys {
    identities: Vec<Box<dyn age::Identity>>,
    passphrase: Option<SecretString>,
}

impl Keys {
    /// Adds the keys of an identity file: one `AGE-SECRET-KEY-1...` per line, in the form that
    /// `age-keygen` writes.
    ///
    /// Errors: the message contains the number of a line, never its text.
    pub fn add_identities(&mut self, file: impl BufRead) -> io::Result<()> {
        let found = IdentityFile::from_buffer(file)?.into_identities().map_err(io::Error::other)?;
        if found.is_empty() {
            return Err(io::Error::other("it holds no identity"));
        }
        self.identities.extend(found);
        Ok(())
    }

    /// Sets the passphrase.
    pub fn set_passphrase(&mut self, passphrase: String) {
        self.passphrase = Some(passphrase.into());
    }

    /// Starts to read an archive, encrypted or not.
    ///
    /// Errors: [`Error::Seal`] if none of the keys opens it, [`Error::Damaged`].
    pub fn open<R: Read>(&self, input: R) -> Result<Opened<R>> {
        let mut input = BufReader::new(input);
        let mut head = Vec::new();
        (&mut input).take(MAGIC.len() as u64).read_to_end(&mut head).map_err(broken)?;
        if head == ARMOR {
            let what = "the archive is encrypted and was made text: `age --decrypt` it first";
            return Err(Error::Seal(what.into()));
        }
        if head != MAGIC {
            return Ok(Opened(Inner::Plain(Cursor::new(head).chain(input))));
        }
        read_head(&mut input, &mut head)?;
        // The head is first parsed alone: so the parser cannot read beyond the head, whatever it
        // contains.
        if Decryptor::new_buffered(&head[..]).is_err() {
            return Err(Error::damaged(SEALED, "its head is not what was written"));
        }
        let decryptor = Decryptor::new_buffered(Cursor::new(head).chain(input)).map_err(refused)?;
        let stream = if decryptor.is_scrypt() {
            let Some(passphrase) = self.passphrase.clone() else {
                let what =
                    "the archive is encrypted with a passphrase: give --passphrase-file FILE";
                return Err(Error::Seal(what.into()));
            };
            let mut identity = scrypt::Identity::new(passphrase);
            identity.set_max_work_factor(WORK_MAX);
            decryptor.decrypt(iter::once(&identity as &dyn age::Identity))
        } else if self.identities.is_empty() {
            return Err(Error::Seal("the archive is encrypted: give --identity FILE".into()));
        } else {
            decryptor.decrypt(self.identities.iter().map(|one| &**one))
        };
        Ok(Opened(Inner::Sealed(Box::new(stream.map_err(refused)?))))
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let passphrase = if self.passphrase.is_some() { " and a passphrase" } else { "" };
        write!(f, "Keys({} identities{passphrase})", self.identities.len())
    }
}

/// Reads the bytes after [`MAGIC`], to the end of the nonce.
fn read_head(input: &mut impl BufRead, head: &mut Vec<u8>) -> Result<()> {
    let mut line = 0;
    for _ in 0..HEAD_LINES_MAX {
        let left = HEAD_BYTES_MAX - head.len();
        let read = input.take(left as u64).read_until(b'\n', head).map_err(broken)?;
        if read == 0 || !head.ends_with(b"\n") {
            let is_long = head.len() == HEAD_BYTES_MAX;
            let what = if is_long { "its head is too long" } else { "it is cut off" };
            return Err(Error::damaged(SEALED, what));
        }
        if line == 0 && head != HEAD {
            let what = "the archive is encrypted by a version of age's format that is not 1";
            return Err(Error::Elsewhere(what.into()));
        }
        if head[line..].starts_with(HEAD_END) {
            let length = head.len();
            head.resize(length + NONCE_BYTES, 0);
            return input.read_exact(&mut head[length..]).map_err(broken);
        }
        line = head.len();
    }
    Err(Error::damaged(SEALED, "its head is too long"))
}

/// The error for an archive that was not opened. The texts are written here: those of the library
/// have several lines, and one of them computes with a number of the head.
fn refused(error: DecryptError) -> Error {
    match error {
        DecryptError::NoMatchingKeys => {
            Error::Seal("the archive is encrypted, and no identity that was given opens it".into())
        }
        DecryptError::DecryptionFailed => {
            Error::Seal("the archive is encrypted with another passphrase".into())
        }
        DecryptError::ExcessiveWork { required, .. } => Error::Seal(format!(
            "the archive requires 2^{required} units of work on its passphrase, at most \
             2^{WORK_MAX} are done"
        )),
        DecryptError::Io(e) => broken(e),
        _ => Error::damaged(SEALED, "its head is not what was written"),
    }
}

fn broken(error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => Error::damaged(SEALED, "it is cut off"),
        _ => Error::file("cannot read", ARCHIVE)(error),
    }
}

/// An archive that is being read, after decryption if it was encrypted.
pub struct Opened<R: Read>(Inner<R>);

/// The bytes that were read for the detection of the format, and the rest.
type Input<R> = Chain<Cursor<Vec<u8>>, BufReader<R>>;

enum Inner<R: Read> {
    Plain(Input<R>),
    Sealed(Box<StreamReader<Input<R>>>),
}

impl<R: Read> Read for Opened<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let stream = match &mut self.0 {
            Inner::Plain(input) => return input.read(buffer),
            Inner::Sealed(stream) => stream,
        };
        stream.read(buffer).map_err(|e| match e.kind() {
            io::ErrorKind::InvalidData => {
                io::Error::other(Error::damaged(SEALED, "it is not what was encrypted"))
            }
            io::ErrorKind::UnexpectedEof => {
                io::Error::other(Error::damaged(SEALED, "it is cut off"))
            }
            _ => e,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archive::{ArchiveReader, ArchiveWriter};

    const CHUNK_BYTES: usize = (64 << 10) + 16;

    fn pair() -> (Recipient, Keys) {
        let identity = x25519::Identity::generate();
        let recipient = Recipient(identity.to_public());
        (recipient, Keys { identities: vec![Box::new(identity)], passphrase: None })
    }

    fn sealed(seal: &Seal, bytes: &[u8]) -> Vec<u8> {
        let mut out = seal.around(Vec::new()).unwrap();
        out.write_all(bytes).unwrap();
        out.finish().unwrap()
    }

    fn is_sealed(keys: &Keys, bytes: &[u8]) -> bool {
        matches!(keys.open(bytes).unwrap().0, Inner::Sealed(_))
    }

    fn opened(keys: &Keys, bytes: &[u8]) -> std::result::Result<Vec<u8>, String> {
        let mut input = keys.open(bytes).map_err(|e| e.to_string())?;
        let mut all = Vec::new();
        input.read_to_end(&mut all).map_err(|e| e.to_string())?;
        Ok(all)
    }

    /// An archive with one part.
    fn archive(part: &[u8]) -> Vec<u8> {
        let mut archive = ArchiveWriter::begin(Vec::new(), false).unwrap();
        let mut out = archive.part("one").unwrap();
        out.write_all(part).unwrap();
        out.finish().unwrap();
        archive.finish().unwrap()
    }

    fn read_archive(keys: &Keys, bytes: &[u8]) -> Result<Vec<u8>> {
        let mut archive = ArchiveReader::open(keys.open(bytes)?)?;
        let part = archive.part("one")?.read_whole(1 << 20)?;
        archive.end()?;
        Ok(part)
    }

    /// The offset of the nonce.
    fn head_end(bytes: &[u8]) -> usize {
        let at = bytes.windows(5).position(|w| w == b"\n--- ").unwrap() + 1;
        at + bytes[at..].iter().position(|b| *b == b'\n').unwrap() + 1
    }

    #[test]
    fn each_recipient_opens_the_archive() {
        let ((one, his), (other, hers)) = (pair(), pair());
        let seal = Seal::of_recipients(vec![one, other]).unwrap();
        for length in [0, 1, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 200_000] {
            let bytes = b"word".repeat(length / 4 + 1)[..length].to_vec();
            let out = sealed(&seal, &bytes);
            assert!(!out.windows(8).any(|w| w == b"wordword"));
            assert!(is_sealed(&his, &out));
            assert_eq!(opened(&his, &out).unwrap(), bytes);
            assert_eq!(opened(&hers, &out).unwrap(), bytes);
        }
    }

    #[test]
    fn unencrypted_input_is_read_unchanged() {
        let (_, keys) = pair();
        for bytes in [&b""[..], b"D", b"age", &MAGIC[1..], &archive(b"some")] {
            assert!(!is_sealed(&keys, bytes));
            assert_eq!(opened(&keys, bytes).unwrap(), bytes);
        }
    }

    #[test]
    fn only_the_right_key_opens_an_archive() {
        let ((one, his), (_, hers)) = (pair(), pair());
        let out = sealed(&Seal::of_recipients(vec![one]).unwrap(), b"some");
        let mut phrase = Keys::default();
        phrase.set_passphrase("right".into());
        for (keys, said) in [
            (Keys::default(), "give --identity FILE"),
            (hers, "no identity that was given opens it"),
            (phrase, "give --identity FILE"),
        ] {
            let error = keys.open(&out[..]).map(|_| ()).unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
            assert!(matches!(error, Error::Seal(_)));
        }
        assert_eq!(opened(&his, &out).unwrap(), b"some");
    }

    #[test]
    fn only_the_right_passphrase_opens_an_archive() {
        let out = sealed(&Seal::of_passphrase("right".into()), b"some");
        let (_, mut keys) = pair();
        let said = opened(&keys, &out).unwrap_err();
        assert!(said.contains("give --passphrase-file FILE"), "{said}");
        keys.set_passphrase("wrong".into());
        let said = opened(&keys, &out).unwrap_err();
        assert!(said.contains("another passphrase"), "{said}");
        keys.set_passphrase("right".into());
        assert_eq!(opened(&keys, &out).unwrap(), b"some");
    }

    #[test]
    fn a_changed_or_cut_archive_is_refused() {
        let (one, keys) = pair();
        let seal = Seal::of_recipients(vec![one]).unwrap();
        let part = vec![7; 200_000];
        let good = sealed(&seal, &archive(&part));
        assert_eq!(read_archive(&keys, &good).unwrap(), part);
        let chunks = head_end(&good) + NONCE_BYTES;
        // Every byte of the head and around the ends of chunks, some of the other bytes.
        let is_near = |at: usize| (at - chunks) % CHUNK_BYTES < 40 || at + 40 > good.len();
        for at in (0..good.len()).filter(|at| *at < chunks || is_near(*at) || at % 4999 == 0) {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            assert!(read_archive(&keys, &bad).is_err(), "byte {at}");
            assert!(read_archive(&keys, &good[..at]).is_err(), "cut at {at}");
        }
        for more in [&[0][..], &good, &[0; CHUNK_BYTES]] {
            let said = read_archive(&keys, &[&good[..], more].concat()).unwrap_err().to_string();
            assert!(said.contains("not what was encrypted"), "{said}");
        }
        let chunk = |n: usize| &good[chunks + n * CHUNK_BYTES..][..CHUNK_BYTES];
        let rest = &good[chunks + 2 * CHUNK_BYTES..];
        for bad in [
            [&good[..chunks], chunk(1), chunk(0), rest].concat(),
            [&good[..chunks], chunk(1), rest].concat(),
            [&good[..chunks], chunk(0), chunk(0), chunk(1), rest].concat(),
        ] {
            let said = read_archive(&keys, &bad).unwrap_err().to_string();
            assert!(said.contains("not what was encrypted"), "{said}");
        }
    }

    /// The archive inside is complete, but the encrypted stream is not.
    #[test]
    fn a_missing_end_or_trailing_data_is_found() {
        let (one, keys) = pair();
        let seal = Seal::of_recipients(vec![one]).unwrap();
        // An archive that ends at the end of a chunk, and extra bytes after it.
        let frame = archive(b"").len() + 4;
        let exact = archive(&vec![7; 3 * (64 << 10) - frame]);
        assert_eq!(exact.len(), 3 << 16);
        let good = sealed(&seal, &exact);
        assert!(read_archive(&keys, &good).is_ok());
        let two = sealed(&seal, &[&exact[..], b"more"].concat());
        let cut = &two[..head_end(&two) + NONCE_BYTES + 3 * CHUNK_BYTES];
        let said = read_archive(&keys, cut).unwrap_err().to_string();
        assert!(said.contains("cut off"), "{said}");
        let said = read_archive(&keys, &two).unwrap_err().to_string();
        assert!(said.contains("something follows it"), "{said}");
        let said = read_archive(&keys, &[&good[..], b"x"].concat()).unwrap_err().to_string();
        assert!(said.contains("not what was encrypted"), "{said}");
        // An unfinished stream.
        let mut left = Vec::new();
        seal.around(&mut left).unwrap().write_all(&exact).unwrap();
        let said = read_archive(&keys, &left).unwrap_err().to_string();
        assert!(said.contains("cut off"), "{said}");
    }

    /// A reader without end that counts bytes.
    struct Endless<'a>(&'a [u8], &'a [u8], usize);

    impl Read for Endless<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            for byte in buffer.iter_mut() {
                if self.0.is_empty() {
                    self.0 = self.1;
                }
                *byte = self.0[0];
                self.0 = &self.0[1..];
            }
            self.2 += buffer.len();
            Ok(buffer.len())
        }
    }

    #[test]
    fn a_head_without_end_is_cut_off() {
        let (_, keys) = pair();
        let head = |rest: &str| [HEAD, rest.as_bytes()].concat();
        for (begin, again, said) in [
            (head(""), "x", "too long"),
            (head("-> X25519 "), "a ", "too long"),
            (head(""), "-> a\n\n", "too long"),
            (head(""), "-> a\nYWFh\n", "too long"),
            (head("-> X25519 a\n"), "\n", "too long"),
            (head("-> a\n\n--- "), "a", "too long"),
            // Cases in which the library would continue to read.
            (head("-> a\n\n--- a\n"), "a", "not what was written"),
            (head("---\n"), "a", "not what was written"),
            (b"age-encryption.org/v2\n".to_vec(), "a", "not 1"),
            (b"age-encryption.org/".to_vec(), "v", "too long"),
            (b"-----BEGIN AGE ENCRYPTED FILE-----\n".to_vec(), "a", "made text"),
        ] {
            let mut input = Endless(&begin, again.as_bytes(), 0);
            let error = keys.open(&mut input).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains(said), "{said}: {error}");
            assert!(input.2 <= HEAD_BYTES_MAX + (16 << 10), "{} bytes", input.2);
        }
    }

    #[test]
    fn work_beyond_the_limit_is_refused() {
        let mut keys = Keys::default();
        keys.set_passphrase("some".into());
        let good = sealed(&Seal::of_passphrase("some".into()), b"some");
        let text = String::from_utf8_lossy(&good[..head_end(&good)]).into_owned();
        let at = text.find(&format!(" {WORK}\n")).unwrap() + 1;
        for work in ["21", "22", "30", "62", "63", "64", "99", "255"] {
            let bad = [&good[..at], work.as_bytes(), &good[at + 2..]].concat();
            let said = opened(&keys, &bad).unwrap_err();
            assert!(said.contains(&format!("2^{work} units of work")), "{said}");
        }
        for work in ["", "0", "-1", "256", "9999999999", "x"] {
            let bad = [&good[..at], work.as_bytes(), &good[at + 2..]].concat();
            assert!(opened(&keys, &bad).is_err(), "{work}");
        }
    }

    #[test]
    fn the_maximum_of_recipients_can_be_read() {
        let (last, keys) = pair();
        let mut all: Vec<_> = std::iter::repeat_with(|| pair().0).take(RECIPIENTS_MAX).collect();
        all[RECIPIENTS_MAX - 1] = last.clone();
        let out = sealed(&Seal::of_recipients(all.clone()).unwrap(), b"some");
        assert_eq!(opened(&keys, &out).unwrap(), b"some");
        all.push(last);
        assert!(Seal::of_recipients(all).is_err());
        assert!(Seal::of_recipients(Vec::new()).is_err());
    }

    #[test]
    fn recipients_and_identities_are_read_from_lists() {
        let (one, _) = pair();
        let text = format!("# the first\n\n  {}\r\n{}", one.0, one.0);
        assert_eq!(Recipient::read_list(&text).unwrap().len(), 2);
        assert!(Recipient::read_list("# none\n").unwrap().is_empty());
        let secret = "AGE-SECRET-KEY-1GQ9778VQXMMJVE8SK7J6VT8UJ4HDQAJUVSFCWCM02D8GEWQ72PVQ2Y5J33";
        for bad in [secret, &secret.to_lowercase(), "age1", "ssh-ed25519 AAAA", "age1x\u{1b}"] {
            let said = bad.parse::<Recipient>().unwrap_err().to_string();
            assert!(!said.to_uppercase().contains("1GQ9778"), "{said}");
        }
        let mut keys = Keys::default();
        let text = format!("# created: today\n\n{secret}\n{secret}");
        keys.add_identities(text.as_bytes()).unwrap();
        assert_eq!(format!("{keys:?}"), "Keys(2 identities)");
        let said = keys.add_identities(format!("{secret}\n{secret}x").as_bytes());
        let said = said.unwrap_err().to_string();
        assert!(said.contains("line 2") && !said.contains("1GQ9778"), "{said}");
        assert!(keys.add_identities(&b"# none\n"[..]).is_err());
        assert!(keys.add_identities(&b"\xff\n"[..]).is_err());
    }

    proptest::proptest! {
        #[test]
        fn any_head_is_read_or_refused(
            lines in proptest::collection::vec("(-> )?(X25519|scrypt|---)?[ -~]{0,70}", 0..6),
            rest in proptest::collection::vec(0u8.., 0..100),
        ) {
            let (_, mut keys) = pair();
            keys.set_passphrase("some".into());
            let text = lines.join("\n");
            let all = [HEAD, text.as_bytes(), b"\n--- ", &[b'A'; 43], b"\n", &rest].concat();
            assert!(opened(&keys, &all).is_err());
        }
    }
}
