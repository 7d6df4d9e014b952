//! Events: what happens to containers, told to containerd in the order in which it happened.

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
/// How long one try may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// The way to containerd. Clones lead to the same queue.
#[derive(Debug, Clone)]
pub struct Events {
    queue: UnboundedSender<Envelope>,
    namespace: String,
}

impl Events {
    /// Starts the task that tells them; it ends when nobody has anything to tell any more.
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
        self.queue.send(envelope).context("nobody tells events any more")
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
        let mut told = Ok(());
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                tokio::time::sleep(BETWEEN).await;
            }
            told = tell(&mut client, &address, &request).await;
            match told {
                Ok(()) => break,
                // A new containerd listens at a new socket.
                Err(_) => client = None,
            }
        }
        if let Err(e) = told {
            eprintln!("the event {topic} is lost: {e:#}");
        }
    }
}

async fn tell(
    client: &mut Option<EventsClient>,
    address: &str,
    request: &ForwardRequest,
) -> Result<()> {
    if client.is_none() {
        *client = Some(EventsClient::new(Client::connect(address).await.context("connecting")?));
    }
    let client = client.as_ref().context("there is no connection")?;
    client.forward(context::with_duration(PATIENCE), request).await.context("telling an event")?;
    Ok(())
}
