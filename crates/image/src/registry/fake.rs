//! A registry for tests: it keeps manifests and blobs in memory, takes uploads, and misbehaves on
//! request. One thread per connection, one request per connection.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::digest::Digest;

/// A request as it came.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    pub method: String,
    /// With its query.
    pub path: String,
    /// Names in lower case.
    pub headers: HashMap<String, String>,
    pub body: Vec<u8>,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    pub fn is_blob(&self, digest: &Digest) -> bool {
        self.method == "GET" && self.path.ends_with(&format!("/blobs/{digest}"))
    }
}

/// An answer.
#[derive(Debug, Clone, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// `Content-Length`, when it is not the truth.
    pub stated_bytes: Option<u64>,
    /// The connection ends after so many bytes of the body.
    pub cut_after: Option<usize>,
    /// The body is sent again and again, as long as the client reads it.
    pub endless: bool,
}

impl Reply {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, body: body.into(), ..Self::default() }
    }

    pub fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }
}

/// The contents of the registry.
#[derive(Debug, Default)]
pub struct Content {
    /// By repository and tag or digest: media type and bytes.
    pub manifests: BTreeMap<(String, String), (String, Vec<u8>)>,
    /// By repository and digest.
    pub blobs: BTreeMap<(String, String), Vec<u8>>,
    pub uploads: u32,
}

impl Content {
    pub fn blob(&mut self, repository: &str, bytes: &[u8]) -> Digest {
        let digest = Digest::of(bytes);
        self.blobs.insert((repository.into(), digest.to_string()), bytes.to_vec());
        digest
    }

    pub fn manifest(&mut self, repository: &str, tag: &str, kind: &str, bytes: &[u8]) -> Digest {
        let digest = Digest::of(bytes);
        for name in [tag.to_owned(), digest.to_string()] {
            self.manifests.insert((repository.into(), name), (kind.into(), bytes.to_vec()));
        }
        digest
    }

    /// Returns the reply of a well-behaved registry.
    pub fn answer(&mut self, seen: &Seen) -> Reply {
        let missing = |code: &str| {
            let body = format!(r#"{{"errors":[{{"code":"{code}","message":"not here"}}]}}"#);
            Reply::new(404, body)
        };
        let (path, query) = seen.path.split_once('?').unwrap_or((&seen.path, ""));
        let query: HashMap<&str, String> = query
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .map(|(k, v)| (k, v.replace("%3A", ":").replace("%2F", "/")))
            .collect();
        let Some(path) = path.strip_prefix("/v2/") else { return missing("UNSUPPORTED") };
        if path.is_empty() {
            return Reply::new(200, "{}");
        }
        let method = seen.method.as_str();
        if let Some((repository, which)) = path.split_once("/manifests/") {
            if method == "PUT" {
                let kind = seen.header("content-type").unwrap_or_default().to_owned();
                let digest = self.manifest(repository, which, &kind, &seen.body);
                return Reply::new(201, "").with("docker-content-digest", digest.to_string());
            }
            return match self.manifests.get(&(repository.into(), which.into())) {
                None => missing("MANIFEST_UNKNOWN"),
                Some((kind, bytes)) => Reply::new(200, bytes.clone())
                    .with("content-type", kind)
                    .with("docker-content-digest", Digest::of(bytes).to_string()),
            };
        }
        let Some((repository, which)) = path.split_once("/blobs/") else {
            return missing("UNSUPPORTED");
        };
        match (method, which) {
            ("POST", _) => {
                if let (Some(digest), Some(from)) = (query.get("mount"), query.get("from"))
                    && let Some(bytes) = self.blobs.get(&(from.clone(), digest.clone())).cloned()
                {
                    self.blob(repository, &bytes);
                    return Reply::new(201, "");
                }
                self.uploads += 1;
                let location = format!("/v2/{repository}/blobs/uploads/{}?state=a", self.uploads);
                Reply::new(202, "").with("location", location)
            }
            ("PUT", _) => {
                let digest = Digest::of(&seen.body);
                if query.get("digest") != Some(&digest.to_string()) {
                    return Reply::new(400, r#"{"errors":[{"code":"DIGEST_INVALID"}]}"#);
                }
                self.blob(repository, &seen.body);
                Reply::new(201, "")
            }
            _ => match self.blobs.get(&(repository.into(), which.into())) {
                None => missing("BLOB_UNKNOWN"),
                Some(bytes) => {
                    let range = seen.header("range").and_then(|r| {
                        r.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok()
                    });
                    match range {
                        Some(from) if from < bytes.len() => {
                            let range = format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len());
                            Reply::new(206, &bytes[from..]).with("content-range", range)
                        }
                        Some(_) => Reply::new(416, ""),
                        None => Reply::new(200, bytes.clone()),
                    }
                }
            },
        }
    }
}

/// A running registry; it ends when it is dropped.
pub struct Fake {
    pub address: SocketAddr,
    pub content: Arc<Mutex<Content>>,
    seen: Arc<Mutex<Vec<Seen>>>,
    stop: Arc<AtomicBool>,
}

impl Fake {
    /// Starts a well-behaved registry.
    pub fn start(content: Content) -> Self {
        Self::twisted(content, |_, _, reply| reply)
    }

    /// Starts a registry with replies changed by `twist`. The arguments are the request, the number
    /// of earlier requests of the same method and path, and the unchanged reply.
    pub fn twisted(
        content: Content,
        twist: impl Fn(&Seen, usize, Reply) -> Reply + Send + Sync + 'static,
    ) -> Self {
        Self::serve(content, twist, None)
    }

    /// Starts a registry behind TLS.
    pub fn tls(content: Content, tls: Arc<rustls::ServerConfig>) -> Self {
        Self::serve(content, |_, _, reply| reply, Some(tls))
    }

    fn serve(
        content: Content,
        twist: impl Fn(&Seen, usize, Reply) -> Reply + Send + Sync + 'static,
        tls: Option<Arc<rustls::ServerConfig>>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let fake = Self {
            address: listener.local_addr().unwrap(),
            content: Arc::new(Mutex::new(content)),
            seen: Arc::default(),
            stop: Arc::default(),
        };
        let (content, seen, stop) = (fake.content.clone(), fake.seen.clone(), fake.stop.clone());
        let twist = Arc::new(twist);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                let stream = stream.unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
                let (content, seen, twist) = (content.clone(), seen.clone(), twist.clone());
                let tls = tls.clone();
                std::thread::spawn(move || {
                    let answer = |request: &Seen| {
                        let before = {
                            let mut seen = seen.lock().unwrap();
                            let same =
                                |s: &&Seen| s.method == request.method && s.path == request.path;
                            let before = seen.iter().filter(same).count();
                            seen.push(request.clone());
                            before
                        };
                        let reply = content.lock().unwrap().answer(request);
                        twist(request, before, reply)
                    };
                    // A client that disconnects is no error.
                    drop(match tls {
                        None => converse(stream, answer),
                        Some(tls) => rustls::ServerConnection::new(tls)
                            .map_err(std::io::Error::other)
                            .and_then(|c| converse(rustls::StreamOwned::new(c, stream), answer)),
                    });
                });
            }
        });
        fake
    }

    /// A name in this registry.
    pub fn name(&self, rest: &str) -> dormouse_model::Reference {
        format!("{}/{rest}", self.address).parse().unwrap()
    }

    /// Returns the requests so far.
    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    /// Number of blobs fetched so far.
    pub fn blobs_fetched(&self) -> usize {
        let blob = |s: &&Seen| s.method == "GET" && s.path.contains("/blobs/");
        self.seen().iter().filter(blob).count()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(self.address));
    }
}

fn converse(stream: impl Read + Write, answer: impl FnOnce(&Seen) -> Reply) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    let Some(request) = read_request(&mut stream)? else {
        // A client that speaks TLS, for example.
        let mut stream = stream.into_inner();
        return stream.write_all(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n");
    };
    let head = request.method == "HEAD";
    let reply = answer(&request);
    let mut stream = stream.into_inner();
    let mut text = format!("HTTP/1.1 {} x\r\nconnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    let length = reply.stated_bytes.unwrap_or(reply.body.len() as u64);
    if !reply.endless {
        text.push_str(&format!("content-length: {length}\r\n"));
    }
    stream.write_all(format!("{text}\r\n").as_bytes())?;
    if head {
        return stream.flush();
    }
    loop {
        stream.write_all(&reply.body[..reply.cut_after.unwrap_or(reply.body.len())])?;
        stream.flush()?;
        if !reply.endless {
            return Ok(());
        }
    }
}

fn read_request(stream: &mut impl BufRead) -> std::io::Result<Option<Seen>> {
    let mut line = Vec::new();
    stream.take(4096).read_until(b'\n', &mut line)?;
    let line = String::from_utf8_lossy(&line).into_owned();
    let mut words = line.split_whitespace();
    let (Some(method), Some(path), Some("HTTP/1.1")) = (words.next(), words.next(), words.next())
    else {
        return Ok(None);
    };
    let mut seen = Seen { method: method.into(), path: path.into(), ..Seen::default() };
    loop {
        let mut line = String::new();
        stream.read_line(&mut line)?;
        match line.trim_end().split_once(':') {
            Some((name, value)) => {
                seen.headers.insert(name.to_lowercase(), value.trim().to_owned())
            }
            None => break,
        };
    }
    let length = seen.header("content-length").and_then(|n| n.parse().ok()).unwrap_or(0);
    seen.body.resize(length, 0);
    stream.read_exact(&mut seen.body)?;
    Ok(Some(seen))
}
