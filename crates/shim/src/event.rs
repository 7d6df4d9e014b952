//! Events: changes of containers, sent to containerd in the order in which they happened.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::{MessageField, MessageFull};
use containerd_shim_protos::shim::event::Envelope;
use containerd_shim_protos::shim::events::ForwardRequest;
use containerd_shim_protos::shim_async::{Client, EventsClient};
use containerd_shim_protos::ttrpc::context;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;

/// LIMIT: how often one event is tried; containerd may just be starting again.
const ATTEMPTS: u32 = 10;
const BETWEEN: Duration = Duration::from_millis(500);
/// Time limit of one attempt.
const PATIENCE: Duration = Duration::from_secs(5);

/// The way to containerd. Clones lead to the same queue.
#[derive(Debug, Clone)]
pub struct Events {
    queue: UnboundedSender<Envelope>,
    namespace: String,
}

impl Events {
    /// Starts the task that sends them; it ends when all senders are dropped.
    pub fn to(address: &str, namespace: &str) -> (Self, JoinHandle<()>) {
        let (queue, events) = unbounded_channel();
        let address = match address.contains("://") {
            true => address.to_owned(),
            false => format!("unix://{address}"),
        };
        let telling = tokio::spawn(tell_all(address, events));
        (Self { queue, namespace: namespace.to_owned() }, telling)
    }

    /// Queues one.
    pub fn publish<M: MessageFull>(&self, topic: &str, message: &M) -> Result<()> {
        let envelope = Envelope {
            timestamp: MessageField::some(SystemTime::now().into()),
            namespace: self.namespace.clone(),
            topic: topic.to_owned(),
            event: MessageField::some(any(message)?),
            ..Default::default()
        };
        self.queue.send(envelope).context("the event sender has stopped")
    }
}

/// A message with its name, as containerd writes it.
pub fn any<M: MessageFull>(message: &M) -> Result<Any> {
    Ok(Any {
        type_url: M::descriptor().full_name().to_owned(),
        value: message.write_to_bytes().context("writing a message")?,
        ..Default::default()
    })
}

async fn tell_all(address: String, mut events: UnboundedReceiver<Envelope>) {
    let mut client = None;
    while let Some(envelope) = events.recv().await {
        let (topic, mut request) = (envelope.topic.clone(), ForwardRequest::new());
        request.envelope = MessageField::some(envelope);
        let mut sent = Ok(());
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                tokio::time::sleep(BETWEEN).await;
            }
            sent = send(&mut client, &address, &request).await;
            match sent {
                Ok(()) => break,
                // A new containerd listens at a new socket.
                Err(_) => client = None,
            }
        }
        if let Err(e) = sent {
            eprintln!("the event {topic} is lost: {e:#}");
        }
    }
}

async fn send(
    client: &mut Option<EventsClient>,
    address: &str,
    request: &ForwardRequest,
) -> Result<()> {
    if client.is_none() {
        *client = Some(EventsClient::new(Client::connect(address).await.context("connecting")?));
    }
    let client = client.as_ref().context("there is no connection")?;
    client.forward(context::with_duration(PATIENCE), request).await.context("sending an event")?;
    Ok(())
}
