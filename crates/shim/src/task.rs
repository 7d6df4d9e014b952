//! containerd's task API: its requests for the containers of a pod.

use std::collections::HashMap;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};
use std::time::SystemTime;

use anyhow::{Context, Result};
use async_trait::async_trait;
use containerd_shim_protos::api::{self, Empty};
use containerd_shim_protos::events::task as event;
use containerd_shim_protos::protobuf::{EnumOrUnknown, MessageField};
use containerd_shim_protos::shim::oci::ProcessDetails;
use containerd_shim_protos::shim_async::Task;
use containerd_shim_protos::topics;
use containerd_shim_protos::ttrpc::asynchronous::TtrpcContext;
use containerd_shim_protos::ttrpc::{self, Code, get_status};
use dormouse_kernel::cgroup::Forest;
use dormouse_kernel::pidfd;
use serde_json::Value;
use tokio::sync::Notify;

use crate::children::Children;
use crate::container::{Container, End, Phase, Process, lock};
use crate::event::{Events, any};
use crate::runtime::Runtime;
use crate::stream::{self, Console, Wanted};
use crate::{metric, rootfs};

/// Status of a process that could not be queried.
const UNKNOWN: u32 = 255;
const SIGKILL: u32 = 9;

/// The containers of a pod.
#[derive(Debug)]
pub struct Pod {
    /// A reference to itself: verbs continue when their caller has disconnected.
    own: Weak<Self>,
    containers: Mutex<HashMap<String, Arc<Container>>>,
    events: Events,
    children: Arc<Children>,
    done: Arc<Notify>,
}

/// An answer that is an error.
fn refused(code: Code, why: impl Into<String>) -> ttrpc::Error {
    ttrpc::Error::RpcStatus(get_status(code, why.into()))
}

fn failed(e: &anyhow::Error) -> ttrpc::Error {
    let why = format!("{e:#}");
    // containerd recognises an object that is removed already by the code of the error.
    let gone = ["container not running", "does not exist"].iter().any(|words| why.contains(words));
    refused(if gone { Code::NOT_FOUND } else { Code::UNKNOWN }, why)
}

/// A caller that goes away must not leave a verb half done.
async fn whole<T: Send + 'static>(
    work: impl Future<Output = ttrpc::Result<T>> + Send + 'static,
) -> ttrpc::Result<T> {
    match tokio::spawn(work).await {
        Ok(done) => done,
        Err(e) => Err(refused(Code::INTERNAL, e.to_string())),
    }
}

fn time(
    at: SystemTime,
) -> MessageField<containerd_shim_protos::protobuf::well_known_types::timestamp::Timestamp> {
    MessageField::some(at.into())
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

impl Pod {
    pub fn new(events: Events, children: Arc<Children>, done: Arc<Notify>) -> Arc<Self> {
        Arc::new_cyclic(|own| Self {
            own: own.clone(),
            containers: Mutex::default(),
            events,
            children,
            done,
        })
    }

    fn shared(&self) -> ttrpc::Result<Arc<Self>> {
        self.own.upgrade().ok_or_else(|| refused(Code::UNAVAILABLE, "the shim ends"))
    }

    fn container(&self, id: &str) -> ttrpc::Result<Arc<Container>> {
        let found = lock(&self.containers).get(id).cloned();
        found.ok_or_else(|| refused(Code::NOT_FOUND, format!("container {id} does not exist")))
    }

    fn process(&self, id: &str, exec_id: &str) -> ttrpc::Result<(Arc<Container>, Arc<Process>)> {
        let container = self.container(id)?;
        let process = container.process(exec_id);
        let process = process.ok_or_else(|| {
            refused(Code::NOT_FOUND, format!("process {exec_id} of {id} does not exist"))
        })?;
        Ok((container, process))
    }

    fn tell<M: containerd_shim_protos::protobuf::MessageFull>(&self, topic: &str, message: &M) {
        if let Err(e) = self.events.publish(topic, message) {
            eprintln!("{topic}: {e:#}");
        }
    }

    /// Makes a container of a bundle.
    async fn create(self: Arc<Self>, asked: api::CreateTaskRequest) -> Result<u32> {
        let bundle = Path::new(&asked.bundle);
        anyhow::ensure!(asked.checkpoint.is_empty(), "restoring a checkpoint is not supported");
        let runtime = Runtime::new(bundle, asked.options.as_ref())?;
        let wanted = Wanted {
            stdin: asked.stdin.clone(),
            stdout: asked.stdout.clone(),
            stderr: asked.stderr.clone(),
            terminal: asked.terminal,
        };
        let container = Container::new(
            &asked.id,
            bundle.to_owned(),
            runtime,
            wanted,
            has_pid_namespace(bundle)?,
        );
        let container = Arc::new(container);
        let root = bundle.join("rootfs");
        rootfs::mount(&root, &asked.rootfs)?;
        let made = self.clone().begin(&container, &container.first, &[]).await;
        let (pid, pidfd) = match made {
            Ok(made) => made,
            Err(e) => {
                // The runtime leaves nothing behind; what follows it here may.
                let _call = self.children.call();
                let _ = container.runtime.call(&["delete", "--force", &asked.id]).await;
                let _ = rootfs::unmount(&root);
                return Err(e);
            }
        };
        container.find_cgroup();
        lock(&self.containers).insert(asked.id.clone(), container.clone());
        self.tell(
            topics::TASK_CREATE_EVENT_TOPIC,
            &event::TaskCreate {
                container_id: asked.id,
                bundle: asked.bundle,
                rootfs: Vec::new(),
                io: MessageField::some(event::TaskIO {
                    stdin: asked.stdin,
                    stdout: asked.stdout,
                    stderr: asked.stderr,
                    terminal: asked.terminal,
                    ..Default::default()
                }),
                pid,
                ..Default::default()
            },
        );
        let first = container.first.clone();
        tokio::spawn(self.watch(container, first, pidfd));
        Ok(pid)
    }

    /// Calls the runtime for a process: `create` for the first one, `exec` for the others.
    async fn begin(
        self: Arc<Self>,
        container: &Container,
        process: &Process,
        words: &[&str],
    ) -> Result<(u32, OwnedFd)> {
        let (bundle, runtime) = (&container.bundle, &container.runtime);
        // Exec ids are not used as file names: files are named by a hash.
        let name = match process.exec_id.as_str() {
            "" => "first".to_owned(),
            id => format!("exec-{}", &blake3::hash(id.as_bytes()).to_hex()[..16]),
        };
        let pid_file = bundle.join(format!("{name}.pid"));
        let console = match process.wanted.terminal {
            true => Some(Console::listen(bundle, &format!("{name}.tty"))?),
            false => None,
        };
        let (ends, held) = stream::open(&process.wanted)?;
        let pid_text = text(&pid_file);
        let verb = if process.exec_id.is_empty() { "create" } else { "exec" };
        let mut all = vec![verb, "--pid-file", &pid_text];
        let path = console.as_ref().map(Console::path);
        if let Some(path) = &path {
            all.extend(["--console-socket", path]);
        }
        let bundle_text = text(bundle);
        match words {
            [] => {
                all.extend(["--bundle", &bundle_text]);
                all.extend(runtime.create_flags().map(|flag| flag as &str));
            }
            words => all.extend(words),
        }
        all.push(&container.id);
        // ORDER: until its pid is known the process must not be taken for an orphan.
        let _call = self.children.call();
        runtime.start(&all, ends).await?;
        let pid = std::fs::read_to_string(&pid_file).context("reading the pid")?;
        let _ = std::fs::remove_file(&pid_file); // not needed any more
        let pid = pid.trim().parse().context("reading the pid")?;
        self.children.know(pid);
        let pidfd = pidfd::open(pid)?;
        let phase = if verb == "create" { Phase::Created } else { Phase::Running };
        if let Some(console) = console {
            console.attach(&process.wanted, &held)?;
        }
        process.is_there(phase, pid, Arc::new(held));
        Ok((pid, pidfd))
    }

    /// Waits for the exit of a process and reports it.
    async fn watch(
        self: Arc<Self>,
        container: Arc<Container>,
        process: Arc<Process>,
        pidfd: OwnedFd,
    ) {
        let status = match reap(pidfd).await {
            Ok(status) => status,
            Err(e) => {
                eprintln!("how {} ended is not known: {e:#}", container.id);
                UNKNOWN
            }
        };
        let end = End { status, at: SystemTime::now() };
        let pid = process.pid();
        self.children.forget(pid);
        let is_first = process.exec_id.is_empty();
        if is_first && !container.has_pid_namespace {
            let _call = self.children.call();
            let _ = container.runtime.call(&["kill", "--all", &container.id, "KILL"]).await;
        }
        // ORDER: its start is reported first.
        let _order = process.order.lock().await;
        process.streams().end().await;
        if container.ran_out_of_memory() {
            let message =
                event::TaskOOM { container_id: container.id.clone(), ..Default::default() };
            self.tell(topics::TASK_OOM_EVENT_TOPIC, &message);
        }
        process.ends(end);
        let id = if is_first { &container.id } else { &process.exec_id };
        self.tell(
            topics::TASK_EXIT_EVENT_TOPIC,
            &event::TaskExit {
                container_id: container.id.clone(),
                id: id.clone(),
                pid,
                exit_status: status,
                exited_at: time(end.at),
                ..Default::default()
            },
        );
    }

    async fn start(self: Arc<Self>, asked: api::StartRequest) -> ttrpc::Result<u32> {
        let (container, process) = self.process(&asked.id, &asked.exec_id)?;
        let _order = process.order.lock().await;
        if asked.exec_id.is_empty() {
            let call = self.children.call();
            container.runtime.call(&["start", &asked.id]).await.map_err(|e| failed(&e))?;
            drop(call);
            process.runs();
            let (container_id, pid) = (asked.id, process.pid());
            let message = event::TaskStart { container_id, pid, ..Default::default() };
            self.tell(topics::TASK_START_EVENT_TOPIC, &message);
            return Ok(pid);
        }
        if process.phase() != Phase::Wanted {
            return Err(refused(Code::FAILED_PRECONDITION, "the process was started already"));
        }
        let spec = text(&exec_spec(&container, &asked.exec_id));
        let words = ["--detach", "--process", &spec];
        let begun = self.clone().begin(&container, &process, &words).await;
        let _ = std::fs::remove_file(&spec); // it is read
        let (pid, pidfd) = begun.map_err(|e| failed(&e))?;
        let (container_id, exec_id) = (asked.id, asked.exec_id);
        let message = event::TaskExecStarted { container_id, exec_id, pid, ..Default::default() };
        self.tell(topics::TASK_EXEC_STARTED_EVENT_TOPIC, &message);
        tokio::spawn(self.clone().watch(container, process.clone(), pidfd));
        Ok(pid)
    }

    async fn delete(
        self: Arc<Self>,
        asked: api::DeleteRequest,
    ) -> ttrpc::Result<api::DeleteResponse> {
        let (container, process) = self.process(&asked.id, &asked.exec_id)?;
        if process.phase() == Phase::Running && process.end().is_none() {
            return Err(refused(Code::FAILED_PRECONDITION, "the process still runs"));
        }
        if !asked.exec_id.is_empty() {
            let end = match process.phase() {
                Phase::Wanted => End { status: 0, at: SystemTime::now() },
                _ => process.wait().await,
            };
            lock(&container.others).remove(&asked.exec_id);
            let _ = std::fs::remove_file(exec_spec(&container, &asked.exec_id)); // never started
            return Ok(ended(process.pid(), end));
        }
        let call = self.children.call();
        let words = ["delete", "--force", &asked.id];
        container.runtime.call(&words).await.map_err(|e| failed(&e))?;
        drop(call);
        let end = process.wait().await;
        rootfs::unmount(&container.bundle.join("rootfs")).map_err(|e| failed(&e))?;
        lock(&self.containers).remove(&asked.id);
        self.tell(
            topics::TASK_DELETE_EVENT_TOPIC,
            &event::TaskDelete {
                container_id: asked.id,
                pid: process.pid(),
                exit_status: end.status,
                exited_at: time(end.at),
                ..Default::default()
            },
        );
        Ok(ended(process.pid(), end))
    }

    /// A verb of the runtime that only wants an id.
    async fn verb(&self, verb: &str, id: &str) -> ttrpc::Result<Arc<Container>> {
        let container = self.container(id)?;
        let _call = self.children.call();
        container.runtime.call(&[verb, id]).await.map_err(|e| failed(&e))?;
        Ok(container)
    }
}

/// Converts an exit to a response.
fn ended(pid: u32, end: End) -> api::DeleteResponse {
    let exited_at = time(end.at);
    api::DeleteResponse { pid, exit_status: end.status, exited_at, ..Default::default() }
}

/// Waits for a child and reaps it.
async fn reap(pidfd: OwnedFd) -> Result<u32> {
    let pidfd = stream::watched(pidfd).context("watching the process")?;
    loop {
        let mut ready = pidfd.readable().await.context("watching the process")?;
        if let Some(exit) = pidfd::reap(pidfd.get_ref())? {
            return Ok(exit.code().cast_unsigned());
        }
        ready.clear_ready();
    }
}

/// Path of the description of a process until it is started.
fn exec_spec(container: &Container, exec_id: &str) -> std::path::PathBuf {
    let name = blake3::hash(exec_id.as_bytes()).to_hex();
    container.bundle.join(format!("exec-{}.json", &name[..16]))
}

/// Returns whether a container's processes end with its first one.
fn has_pid_namespace(bundle: &Path) -> Result<bool> {
    let config = std::fs::read(bundle.join("config.json")).context("reading config.json")?;
    let config: Value = serde_json::from_slice(&config).context("reading config.json")?;
    let list = config.pointer("/linux/namespaces").and_then(Value::as_array);
    let is_own = |one: &Value| {
        one["type"] == "pid" && one["path"].as_str().is_none_or(|path| path.is_empty())
    };
    Ok(list.is_some_and(|list| list.iter().any(is_own)))
}

#[async_trait]
impl Task for Pod {
    async fn state(
        &self,
        _: &TtrpcContext,
        asked: api::StateRequest,
    ) -> ttrpc::Result<api::StateResponse> {
        let (container, process) = self.process(&asked.id, &asked.exec_id)?;
        let end = process.end();
        let status = match (end, process.phase()) {
            (Some(_), _) => api::Status::STOPPED,
            (None, Phase::Running) if container.is_paused.load(Ordering::Relaxed) => {
                api::Status::PAUSED
            }
            (None, Phase::Running) => api::Status::RUNNING,
            (None, _) => api::Status::CREATED,
        };
        let wanted = &process.wanted;
        Ok(api::StateResponse {
            id: if asked.exec_id.is_empty() { asked.id } else { asked.exec_id.clone() },
            bundle: text(&container.bundle),
            pid: process.pid(),
            status: EnumOrUnknown::new(status),
            stdin: wanted.stdin.clone(),
            stdout: wanted.stdout.clone(),
            stderr: wanted.stderr.clone(),
            terminal: wanted.terminal,
            exit_status: end.map_or(0, |end| end.status),
            exited_at: end.map_or_else(MessageField::none, |end| time(end.at)),
            exec_id: asked.exec_id,
            ..Default::default()
        })
    }

    async fn create(
        &self,
        _: &TtrpcContext,
        asked: api::CreateTaskRequest,
    ) -> ttrpc::Result<api::CreateTaskResponse> {
        if lock(&self.containers).contains_key(&asked.id) {
            return Err(refused(Code::ALREADY_EXISTS, format!("container {} exists", asked.id)));
        }
        let pod = self.shared()?;
        let pid = whole(async move { pod.create(asked).await.map_err(|e| failed(&e)) }).await?;
        Ok(api::CreateTaskResponse { pid, ..Default::default() })
    }

    async fn start(
        &self,
        _: &TtrpcContext,
        asked: api::StartRequest,
    ) -> ttrpc::Result<api::StartResponse> {
        let pid = whole(self.shared()?.start(asked)).await?;
        Ok(api::StartResponse { pid, ..Default::default() })
    }

    async fn delete(
        &self,
        _: &TtrpcContext,
        asked: api::DeleteRequest,
    ) -> ttrpc::Result<api::DeleteResponse> {
        whole(self.shared()?.delete(asked)).await
    }

    async fn pids(
        &self,
        _: &TtrpcContext,
        asked: api::PidsRequest,
    ) -> ttrpc::Result<api::PidsResponse> {
        let container = self.container(&asked.id)?;
        let _call = self.children.call();
        let output = container.runtime.call(&["ps", "--format", "json", &asked.id]).await;
        let output = output.map_err(|e| failed(&e))?;
        let pids: Vec<u32> = serde_json::from_slice(&output)
            .map_err(|e| refused(Code::INTERNAL, format!("ps: {e}")))?;
        let others: Vec<_> = lock(&container.others).values().cloned().collect();
        let about = |pid: u32| {
            let process = others.iter().find(|process| process.pid() == pid);
            let details = process.and_then(|process| {
                let exec_id = process.exec_id.clone();
                any(&ProcessDetails { exec_id, ..Default::default() }).ok()
            });
            let info = details.map_or_else(MessageField::none, MessageField::some);
            api::ProcessInfo { pid, info, ..Default::default() }
        };
        let processes = pids.into_iter().map(about).collect();
        Ok(api::PidsResponse { processes, ..Default::default() })
    }

    async fn pause(&self, _: &TtrpcContext, asked: api::PauseRequest) -> ttrpc::Result<Empty> {
        let container = self.verb("pause", &asked.id).await?;
        container.is_paused.store(true, Ordering::Relaxed);
        let message = event::TaskPaused { container_id: asked.id, ..Default::default() };
        self.tell(topics::TASK_PAUSED_EVENT_TOPIC, &message);
        Ok(Empty::new())
    }

    async fn resume(&self, _: &TtrpcContext, asked: api::ResumeRequest) -> ttrpc::Result<Empty> {
        let container = self.verb("resume", &asked.id).await?;
        container.is_paused.store(false, Ordering::Relaxed);
        let message = event::TaskResumed { container_id: asked.id, ..Default::default() };
        self.tell(topics::TASK_RESUMED_EVENT_TOPIC, &message);
        Ok(Empty::new())
    }

    async fn kill(&self, _: &TtrpcContext, asked: api::KillRequest) -> ttrpc::Result<Empty> {
        let (container, process) = self.process(&asked.id, &asked.exec_id)?;
        if process.end().is_some() && !asked.all {
            return Err(refused(Code::NOT_FOUND, "process already finished"));
        }
        if asked.exec_id.is_empty() {
            let signal = asked.signal.to_string();
            let mut words = vec!["kill"];
            words.extend(asked.all.then_some("--all"));
            words.extend([asked.id.as_str(), &signal]);
            let _call = self.children.call();
            container.runtime.call(&words).await.map_err(|e| failed(&e))?;
            if asked.signal == SIGKILL {
                // The runtime thaws a frozen container; it could not die otherwise.
                container.is_paused.store(false, Ordering::Relaxed);
            }
            return Ok(Empty::new());
        }
        // Not reaped, so its pid is its own.
        let sent = match process.pid() {
            0 => return Err(refused(Code::FAILED_PRECONDITION, "the process was not started")),
            pid => pidfd::open(pid).and_then(|fd| pidfd::send_signal(fd, asked.signal as i32)),
        };
        sent.map_err(|e| refused(Code::NOT_FOUND, e.to_string()))?;
        Ok(Empty::new())
    }

    async fn exec(&self, _: &TtrpcContext, asked: api::ExecProcessRequest) -> ttrpc::Result<Empty> {
        let container = self.container(&asked.id)?;
        let spec = asked.spec.as_ref().map(|any| any.value.as_slice()).unwrap_or_default();
        let wanted = Wanted {
            stdin: asked.stdin,
            stdout: asked.stdout,
            stderr: asked.stderr,
            terminal: asked.terminal,
        };
        let process = Arc::new(Process::new(&asked.exec_id, wanted));
        let mut others = lock(&container.others);
        if asked.exec_id.is_empty() || others.contains_key(&asked.exec_id) {
            let why = format!("process {:?} exists", asked.exec_id);
            return Err(refused(Code::ALREADY_EXISTS, why));
        }
        std::fs::write(exec_spec(&container, &asked.exec_id), spec)
            .map_err(|e| refused(Code::INTERNAL, format!("writing down the process: {e}")))?;
        others.insert(asked.exec_id.clone(), process);
        drop(others);
        let (container_id, exec_id) = (asked.id, asked.exec_id);
        let message = event::TaskExecAdded { container_id, exec_id, ..Default::default() };
        self.tell(topics::TASK_EXEC_ADDED_EVENT_TOPIC, &message);
        Ok(Empty::new())
    }

    async fn resize_pty(
        &self,
        _: &TtrpcContext,
        asked: api::ResizePtyRequest,
    ) -> ttrpc::Result<Empty> {
        let (_, process) = self.process(&asked.id, &asked.exec_id)?;
        if process.end().is_some() {
            // The caller could not know that it has exited.
            return Ok(Empty::new());
        }
        process.streams().resize(asked.width, asked.height).map_err(|e| failed(&e))?;
        Ok(Empty::new())
    }

    async fn close_io(&self, _: &TtrpcContext, asked: api::CloseIORequest) -> ttrpc::Result<Empty> {
        let (_, process) = self.process(&asked.id, &asked.exec_id)?;
        if asked.stdin {
            process.streams().close_input();
        }
        Ok(Empty::new())
    }

    async fn update(
        &self,
        _: &TtrpcContext,
        asked: api::UpdateTaskRequest,
    ) -> ttrpc::Result<Empty> {
        let container = self.container(&asked.id)?;
        let resources =
            asked.resources.as_ref().map(|any| any.value.as_slice()).unwrap_or_default();
        let path = container.bundle.join("update.json");
        std::fs::write(&path, resources)
            .map_err(|e| refused(Code::INTERNAL, format!("writing down the limits: {e}")))?;
        let _call = self.children.call();
        let words = ["update", "--resources", &text(&path), &asked.id];
        container.runtime.call(&words).await.map_err(|e| failed(&e))?;
        Ok(Empty::new())
    }

    async fn wait(
        &self,
        _: &TtrpcContext,
        asked: api::WaitRequest,
    ) -> ttrpc::Result<api::WaitResponse> {
        let (_, process) = self.process(&asked.id, &asked.exec_id)?;
        let end = process.wait().await;
        let exited_at = time(end.at);
        Ok(api::WaitResponse { exit_status: end.status, exited_at, ..Default::default() })
    }

    async fn stats(
        &self,
        _: &TtrpcContext,
        asked: api::StatsRequest,
    ) -> ttrpc::Result<api::StatsResponse> {
        let container = self.container(&asked.id)?;
        let _call = self.children.call();
        let output = container.runtime.call(&["events", "--stats", &asked.id]).await;
        let output: Value = serde_json::from_slice(&output.map_err(|e| failed(&e))?)
            .map_err(|e| refused(Code::INTERNAL, format!("events: {e}")))?;
        let forest = Forest::find().map_err(|e| refused(Code::INTERNAL, e.to_string()))?;
        let stats = metric::of(&output["data"], forest.is_v1("memory")).map_err(|e| failed(&e))?;
        Ok(api::StatsResponse { stats: MessageField::some(stats), ..Default::default() })
    }

    async fn connect(
        &self,
        _: &TtrpcContext,
        asked: api::ConnectRequest,
    ) -> ttrpc::Result<api::ConnectResponse> {
        let task_pid = self.container(&asked.id).map_or(0, |container| container.first.pid());
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let shim_pid = std::process::id();
        Ok(api::ConnectResponse { shim_pid, task_pid, version, ..Default::default() })
    }

    async fn shutdown(
        &self,
        _: &TtrpcContext,
        asked: api::ShutdownRequest,
    ) -> ttrpc::Result<Empty> {
        if asked.now || lock(&self.containers).is_empty() {
            self.done.notify_one();
        }
        Ok(Empty::new())
    }
}
