//! Requests to one repository of one registry: protocol, tokens, retries, bounded answers.
//!
//! oci-client was tried for this and not used: it reads manifests and tokens to their end however
//! long they are, drops the reason why a token was refused, and returns a status without its
//! `Retry-After`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_auth::parser::ChallengeParser;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::header::{CONTENT_LENGTH, WWW_AUTHENTICATE};
use reqwest::{Method, Response, StatusCode, Url};
use serde::Deserialize;
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::access::{Access, Credentials, Place, Route, Scheme};
use super::error::{Failure, plain, tls_error};

/// LIMIT: bytes of an error's body that are read.
const ERROR_MAX_BYTES: u64 = 16 << 10;
/// LIMIT: bytes of a token service's answer.
const TOKEN_MAX_BYTES: u64 = 256 << 10;
/// LIMIT: how long a registry may make us wait before a retry.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// LIMIT: how often one request is sent.
pub(super) const ATTEMPTS: u32 = 5;
/// A connection without data for so long is closed.
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(30);
const CONNECT_MAX: Duration = Duration::from_secs(10);
const REDIRECTS_MAX: usize = 8;
/// Bytes of a body read from a file at once.
const BODY_CHUNK_BYTES: usize = 256 << 10;

/// One repository of one registry.
pub(super) struct Client {
    pub place: Place,
    http: reqwest::Client,
    base: Url,
    credentials: Option<Credentials>,
    /// The configuration file named in messages.
    config_file: PathBuf,
    /// `pull` or `pull,push`.
    actions: &'static str,
    /// Other repositories that are read from, for mounting their blobs.
    also_pull: std::sync::Mutex<Vec<String>>,
    /// The value of `Authorization`, once the registry requested it.
    grant: Mutex<Option<HeaderValue>>,
    /// Whether the registry has replied once: from then on a failed connection is retried.
    reached: AtomicBool,
    /// The first wait before a retry; doubled each time.
    backoff: Duration,
}

/// The body of a request.
#[derive(Default)]
pub(super) enum Body<'b> {
    #[default]
    Empty,
    Bytes(&'b [u8]),
    /// A file from its beginning, with its measured length.
    File {
        file: &'b File,
        bytes: u64,
        /// Bytes sent so far.
        sent: Arc<AtomicU64>,
    },
}

/// One request.
pub(super) struct Request<'r> {
    pub method: Method,
    pub url: Url,
    pub headers: Vec<(HeaderName, String)>,
    pub body: Body<'r>,
    /// The object of the request, for messages: `the manifest latest`.
    pub what: String,
}

impl<'r> Request<'r> {
    pub fn new(method: Method, url: Url, what: impl Into<String>) -> Self {
        Self { method, url, headers: Vec::new(), body: Body::Empty, what: what.into() }
    }

    pub fn header(mut self, name: HeaderName, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    pub fn body(mut self, body: Body<'r>) -> Self {
        self.body = body;
        self
    }
}

impl Client {
    /// Prepares a connection to the registry. A request is sent only if it is unknown whether the
    /// registry uses https or http.
    pub async fn open(
        access: &Access,
        place: Place,
        actions: &'static str,
    ) -> Result<Self, Failure> {
        let route = access.route(&place)?;
        let http = http_client(&route)?;
        let url = |scheme: &str| {
            Url::parse(&format!("{scheme}://{}/", place.host())).map_err(|e| Failure::Malformed {
                registry: place.registry.clone(),
                what: "the address".into(),
                problem: e.to_string(),
            })
        };
        let base = match route.scheme {
            Scheme::Http => url("http")?,
            Scheme::Https => url("https")?,
            Scheme::Either => {
                let https = url("https")?;
                let ping = timeout(SILENCE_MAX, http.get(join(&https, "v2/")).send()).await;
                match ping.as_ref().map(|answer| answer.as_ref().err().map(tls_error)) {
                    // A peer with a certificate uses https. That the certificate is not trusted is
                    // no reason to continue with http.
                    Ok(None | Some(Some(rustls::Error::InvalidCertificate(_)))) => https,
                    _ => url("http")?,
                }
            }
        };
        Ok(Self {
            place,
            http,
            base,
            credentials: route.credentials,
            config_file: route.config_file,
            actions,
            also_pull: std::sync::Mutex::default(),
            grant: Mutex::new(None),
            reached: AtomicBool::new(false),
            backoff: Duration::from_millis(if cfg!(test) { 2 } else { 250 }),
        })
    }

    /// `/v2/REPOSITORY/...`.
    pub fn url(&self, path: &str) -> Url {
        join(&self.base, &format!("v2/{}/{path}", self.place.repository))
    }

    /// Extends later tokens to reading this repository.
    pub async fn also_pull(&self, repository: &str) {
        {
            let mut also = lock(&self.also_pull);
            if also.iter().any(|known| known == repository) {
                return;
            }
            also.push(repository.to_owned());
        }
        // A bearer token names its repositories, so the next request must get another one.
        let mut grant = self.grant.lock().await;
        if grant.as_ref().is_some_and(|g| g.as_bytes().starts_with(b"Bearer")) {
            *grant = None;
        }
    }

    /// Tests whether the registry accepts the credentials.
    pub async fn check_login(&self) -> Result<(), Failure> {
        let url = join(&self.base, "v2/");
        self.send(&Request::new(Method::GET, url, "the login")).await.map(drop)
    }

    /// Sends a request until it is answered well, with waits in between when the failure passes.
    pub async fn send(&self, request: &Request<'_>) -> Result<Response, Failure> {
        let mut attempt = 0;
        loop {
            let failure = match self.send_once(request).await {
                Ok(response) => return Ok(response),
                Err(failure) => failure,
            };
            attempt += 1;
            let first_contact =
                matches!(failure, Failure::Connect { .. }) && !self.reached.load(Ordering::Relaxed);
            if attempt == ATTEMPTS || first_contact || !failure.is_passing() {
                return Err(failure);
            }
            self.wait(attempt, failure).await?;
        }
    }

    /// Waits before retry number `attempt`: for the time that the registry requested, or twice as
    /// long each time. Returns the failure if the registry requested too long a time.
    pub async fn wait(&self, attempt: u32, failure: Failure) -> Result<(), Failure> {
        let pause = match failure.retry_after() {
            Some(pause) if pause > WAIT_MAX => return Err(failure),
            Some(pause) => pause,
            None => (self.backoff * (1 << attempt.min(5))).min(WAIT_MAX),
        };
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// Sends a request once, or twice if the registry first requires authentication.
    pub async fn send_once(&self, request: &Request<'_>) -> Result<Response, Failure> {
        let mut asked = false;
        loop {
            let ours = same_origin(&self.base, &request.url);
            let grant = if ours { self.grant.lock().await.clone() } else { None };
            let mut builder = self.http.request(request.method.clone(), request.url.clone());
            for (name, value) in &request.headers {
                builder = builder.header(name, value);
            }
            if let Some(grant) = &grant {
                builder = builder.header(AUTHORIZATION, grant.clone());
            }
            builder = match &request.body {
                Body::Empty if request.method == Method::GET || request.method == Method::HEAD => {
                    builder
                }
                // Some registries insist on a length.
                Body::Empty => builder.header(CONTENT_LENGTH, 0),
                Body::Bytes(bytes) => builder.body(bytes.to_vec()),
                Body::File { file, bytes, sent } => {
                    builder.header(CONTENT_LENGTH, *bytes).body(file_body(file, *bytes, sent)?)
                }
            };
            let response = match &request.body {
                // A large body may take long to send; its sender watches the progress.
                Body::File { .. } => builder.send().await,
                _ => match timeout(SILENCE_MAX, builder.send()).await {
                    Ok(result) => result,
                    Err(_) => return Err(self.silent(&request.what)),
                },
            };
            let response = response.map_err(|e| self.unreachable(e, &request.what))?;
            self.reached.store(true, Ordering::Relaxed);
            let status = response.status();
            if status == StatusCode::UNAUTHORIZED && ours && !asked {
                asked = true;
                // After a redirect to another host no password is shown there.
                if same_origin(&self.base, response.url()) {
                    self.authenticate(response.headers(), grant.as_ref()).await?;
                    continue;
                }
            }
            if status.is_success() {
                return Ok(response);
            }
            return Err(self.refusal(response, &request.what).await);
        }
    }

    /// Reads a whole answer of at most so many bytes.
    pub async fn read(
        &self,
        mut response: Response,
        max_bytes: u64,
        what: &str,
    ) -> Result<Vec<u8>, Failure> {
        let too_large = || Failure::TooLarge {
            registry: self.place.registry.clone(),
            what: what.to_owned(),
            limit: max_bytes,
        };
        // LIMIT: first by the announced length, then by the received one.
        if response.content_length().is_some_and(|n| n > max_bytes) {
            return Err(too_large());
        }
        let mut body = Vec::new();
        while let Some(chunk) = self.chunk(&mut response, what).await? {
            if body.len() as u64 + chunk.len() as u64 > max_bytes {
                return Err(too_large());
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }

    /// The next piece of an answer; none at its end.
    pub async fn chunk(
        &self,
        response: &mut Response,
        what: &str,
    ) -> Result<Option<Bytes>, Failure> {
        match timeout(SILENCE_MAX, response.chunk()).await {
            Ok(result) => result.map_err(|e| self.cut(e, what)),
            Err(_) => Err(self.silent(what)),
        }
    }

    /// No data arrived in time.
    pub fn silent(&self, what: &str) -> Failure {
        Failure::Silent {
            registry: self.place.registry.clone(),
            what: what.to_owned(),
            seconds: SILENCE_MAX.as_secs(),
        }
    }

    /// A connection that broke in the middle of an answer.
    fn cut(&self, source: reqwest::Error, what: &str) -> Failure {
        Failure::Cut {
            registry: self.place.registry.clone(),
            what: what.to_owned(),
            source: source.without_url(),
        }
    }

    /// A malformed reply.
    pub fn malformed(&self, what: impl Into<String>, problem: impl Into<String>) -> Failure {
        Failure::malformed(&self.place.registry, what, problem)
    }

    /// Returns why there is no connection, and a hint.
    fn unreachable(&self, error: reqwest::Error, what: &str) -> Failure {
        let error = error.without_url();
        if error.is_redirect() {
            let advice = " that way: it redirects too often, or from https to http".to_owned();
            return Failure::Connect {
                registry: self.place.registry.clone(),
                advice,
                source: error,
            };
        }
        if !error.is_connect() && !error.is_request() {
            return self.cut(error, what);
        }
        let config = self.config_file.display();
        let table = format!("[registries.\"{}\"]", self.place.registry);
        let advice = match tls_error(&error) {
            Some(rustls::Error::InvalidCertificate(_)) => format!(
                ": its certificate is not trusted; if it is yours, put `ca = \"FILE.pem\"` under \
                 {table} in {config}"
            ),
            Some(rustls::Error::InvalidMessage(_)) => format!(
                ": it does not speak TLS; if plain http is meant, put `insecure = true` under \
                 {table} in {config}"
            ),
            _ => String::new(),
        };
        Failure::Connect { registry: self.place.registry.clone(), advice, source: error }
    }

    /// Returns the meaning of a status that is no success.
    async fn refusal(&self, response: Response, what: &str) -> Failure {
        let status = response.status();
        let retry_after = response
            .headers()
            .get(RETRY_AFTER)
            .and_then(|v| v.to_str().ok()?.trim().parse().ok())
            .map(Duration::from_secs);
        let body = self.read(response, ERROR_MAX_BYTES, what).await.unwrap_or_default();
        let detail = match error_text(&body) {
            Some(text) => format!(" ({text})"),
            None => String::new(),
        };
        let registry = self.place.registry.clone();
        let what = what.to_owned();
        match status.as_u16() {
            401 | 403 => Failure::Denied {
                registry,
                action: format!("have {what}"),
                detail,
                advice: match &self.credentials {
                    Some(Credentials { user, .. }) if !user.is_empty() => {
                        format!("it does not take the credentials of '{user}' for this")
                    }
                    Some(_) => "it does not take the stored token for this".into(),
                    None => "the name is wrong, or a login is needed (`login`, --creds)".into(),
                },
            },
            404 => Failure::NotFound { registry, what, detail },
            429 if self.credentials.is_none() => Failure::Status {
                registry,
                what,
                status: 429,
                detail: format!("{detail}: too many requests, a login may raise the limit"),
                retry_after,
            },
            status => Failure::Status { registry, what, status, detail, retry_after },
        }
    }

    /// Handles a 401: gets a token, or sends user and password, as the registry requires. `refused`
    /// is the grant that was not accepted.
    async fn authenticate(
        &self,
        headers: &HeaderMap,
        refused: Option<&HeaderValue>,
    ) -> Result<(), Failure> {
        let mut grant = self.grant.lock().await;
        if grant.as_ref() != refused {
            // Another request has got one meanwhile.
            return Ok(());
        }
        let mut basic = false;
        for value in headers.get_all(WWW_AUTHENTICATE) {
            let Ok(value) = value.to_str() else { continue };
            for challenge in ChallengeParser::new(value).map_while(Result::ok) {
                if challenge.scheme.eq_ignore_ascii_case("bearer") {
                    let parameter = |name: &str| {
                        let found =
                            challenge.params.iter().find(|(k, _)| k.eq_ignore_ascii_case(name));
                        found.map(|(_, value)| value.to_unescaped())
                    };
                    let realm = parameter("realm")
                        .ok_or_else(|| self.malformed("the demand for a token", "no realm"))?;
                    let token = self.token(&realm, parameter("service").as_deref()).await?;
                    *grant = Some(self.header(format!("Bearer {token}"))?);
                    return Ok(());
                }
                basic |= challenge.scheme.eq_ignore_ascii_case("basic");
            }
        }
        let denied = |advice: &str| Failure::Denied {
            registry: self.place.registry.clone(),
            action: "in".into(),
            detail: String::new(),
            advice: advice.into(),
        };
        match &self.credentials {
            _ if !basic => Err(denied("it offers neither token nor password authentication")),
            None => Err(denied("it wants a user and a password: `login` or --creds USER:PASSWORD")),
            // Shown once already, or a token, which is of no use here.
            Some(c) if refused.is_some() || c.user.is_empty() => {
                Err(denied(&format!("it does not take the credentials of '{}'", c.user)))
            }
            Some(c) => {
                *grant = Some(self.header(basic_auth(c))?);
                Ok(())
            }
        }
    }

    /// Requests a token from the token service.
    async fn token(&self, realm: &str, service: Option<&str>) -> Result<String, Failure> {
        let what = "the token service";
        let mut url = Url::parse(realm)
            .or_else(|_| self.base.join(realm))
            .map_err(|e| self.malformed("the address of its token service", e.to_string()))?;
        // Passwords go to the token service: not in the clear when the registry itself is not.
        if url.scheme() != "https" && !(url.scheme() == "http" && self.base.scheme() == "http") {
            let problem =
                format!("a {} address from an {} registry", url.scheme(), self.base.scheme());
            return Err(self.malformed("the address of its token service", plain(&problem)));
        }
        let mut scopes = Vec::new();
        if !self.place.repository.is_empty() {
            scopes.push(format!("repository:{}:{}", self.place.repository, self.actions));
            let also = lock(&self.also_pull);
            scopes.extend(also.iter().map(|r| format!("repository:{r}:pull")));
        }
        let is_token = self.credentials.as_ref().is_some_and(|c| c.user.is_empty());
        let mut pairs: Vec<(&str, &str)> = Vec::new();
        pairs.extend(service.map(|s| ("service", s)));
        let joined = scopes.join(" ");
        let builder = match &self.credentials {
            Some(Credentials { secret, .. }) if is_token => {
                // The token service's own dialect of OAuth 2.
                pairs.extend([("client_id", "dormouse"), ("grant_type", "refresh_token")]);
                pairs.extend([("refresh_token", secret.as_str()), ("scope", joined.as_str())]);
                let mut form = url.clone();
                form.query_pairs_mut().clear().extend_pairs(pairs);
                self.http
                    .post(url)
                    .header("content-type", "application/x-www-form-urlencoded")
                    .body(form.query().unwrap_or_default().to_owned())
            }
            credentials => {
                pairs.extend(scopes.iter().map(|s| ("scope", s.as_str())));
                if !pairs.is_empty() {
                    url.query_pairs_mut().extend_pairs(pairs);
                }
                match credentials {
                    Some(c) => {
                        self.http.get(url).header(AUTHORIZATION, self.header(basic_auth(c))?)
                    }
                    None => self.http.get(url),
                }
            }
        };
        let response = match timeout(SILENCE_MAX, builder.send()).await {
            Ok(result) => result.map_err(|e| self.unreachable(e, what))?,
            Err(_) => return Err(self.silent(what)),
        };
        if !response.status().is_success() {
            return Err(self.refusal(response, "a token").await);
        }
        let body = self.read(response, TOKEN_MAX_BYTES, "the token").await?;
        #[derive(Deserialize)]
        struct Answer {
            token: Option<String>,
            access_token: Option<String>,
        }
        let answer: Answer = serde_json::from_slice(&body)
            .map_err(|e| self.malformed("the answer of its token service", e.to_string()))?;
        let token = answer.token.or(answer.access_token).filter(|t| !t.is_empty());
        token.ok_or_else(|| self.malformed("the answer of its token service", "no token in it"))
    }

    fn header(&self, value: String) -> Result<HeaderValue, Failure> {
        let mut value = HeaderValue::try_from(value)
            .map_err(|_| self.malformed("a token or password", "it does not fit into a header"))?;
        value.set_sensitive(true);
        Ok(value)
    }
}

/// `a/b/` below a base without a path.
fn join(base: &Url, path: &str) -> Url {
    let mut url = base.clone();
    let (path, query) = path.split_once('?').map_or((path, None), |(p, q)| (p, Some(q)));
    url.set_path(path);
    url.set_query(query);
    url
}

/// Scheme, host and port are the same.
fn same_origin(a: &Url, b: &Url) -> bool {
    a.scheme() == b.scheme()
        && a.host() == b.host()
        && a.port_or_known_default() == b.port_or_known_default()
}

fn basic_auth(credentials: &Credentials) -> String {
    let pair = format!("{}:{}", credentials.user, credentials.secret);
    format!("Basic {}", STANDARD.encode(pair))
}

/// The holder of this lock cannot panic, so it is never poisoned; even then the list stays valid.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The codes and messages of a registry's error (distribution specification, "Error Codes").
fn error_text(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Body {
        errors: Vec<One>,
    }
    #[derive(Deserialize)]
    struct One {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let body: Body = serde_json::from_slice(body).ok()?;
    let one = body.errors.into_iter().next()?;
    Some(plain(&format!("{}: {}", one.code, one.message)))
}

/// The body of a request, read from a file while it is sent.
fn file_body(file: &File, bytes: u64, sent: &Arc<AtomicU64>) -> Result<reqwest::Body, Failure> {
    let sent = Arc::clone(sent);
    sent.store(0, Ordering::Relaxed);
    let file = file
        .try_clone()
        .map_err(|source| Failure::Local { step: "open the blob once more", source })?;
    let chunks = futures_util::stream::try_unfold((file, 0), move |(file, at)| {
        let sent = Arc::clone(&sent);
        async move {
            let left = bytes - at;
            if left == 0 {
                return Ok::<_, std::io::Error>(None);
            }
            let mut chunk =
                vec![0; BODY_CHUNK_BYTES.min(usize::try_from(left).unwrap_or(usize::MAX))];
            file.read_exact_at(&mut chunk, at)?;
            let next = at + chunk.len() as u64;
            sent.store(at, Ordering::Relaxed);
            Ok(Some((chunk, (file, next))))
        }
    });
    Ok(reqwest::Body::wrap_stream(chunks))
}

/// TLS by rustls with ring, the system's certificates, names by hickory.
fn http_client(route: &Route) -> Result<reqwest::Client, Failure> {
    // Installed by other code of this process already: that provider serves as well.
    drop(rustls::crypto::ring::default_provider().install_default());
    let builder = || {
        reqwest::Client::builder()
            .user_agent(concat!("dormouse/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_MAX)
            .referer(false)
            .redirect(redirects())
    };
    let failed = |source: reqwest::Error| Failure::Local {
        step: "prepare TLS",
        source: std::io::Error::other(source),
    };
    if let Some(pem) = &route.ca {
        let certificates = reqwest::Certificate::from_pem_bundle(pem).map_err(failed)?;
        return builder().tls_certs_merge(certificates).build().map_err(failed);
    }
    match builder().build() {
        Ok(client) => Ok(client),
        // A machine without certificates can still use plain http; https will fail.
        Err(_) => builder().tls_certs_only([]).build().map_err(failed),
    }
}

fn redirects() -> reqwest::redirect::Policy {
    reqwest::redirect::Policy::custom(|attempt| {
        let from_https = attempt.previous().last().is_some_and(|url| url.scheme() == "https");
        if attempt.previous().len() > REDIRECTS_MAX {
            attempt.error("too many redirects")
        } else if from_https && attempt.url().scheme() != "https" {
            attempt.error("a redirect from https to http")
        } else {
            attempt.follow()
        }
    })
}
