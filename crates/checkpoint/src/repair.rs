//! Repair mode of TCP sockets (TCP_REPAIR): its options and values.
//!
//! `save` reads connections by them, `load` and `accept` make connections again.

use std::net::SocketAddr;

use crate::format::{Bytes, Connection, TcpState};

/// Options of tcp(7) that work in repair mode only.
pub(crate) const REPAIR: i32 = 19;
pub(crate) const REPAIR_QUEUE: i32 = 20;
pub(crate) const QUEUE_SEQUENCE: i32 = 21;
pub(crate) const TIMESTAMP: i32 = 24;
pub(crate) const REPAIR_WINDOW: i32 = 29;

/// Value of REPAIR: off, without a window probe to the peer.
pub(crate) const OFF_SILENTLY: i32 = -1;

/// Values of REPAIR_QUEUE.
pub(crate) const NO_QUEUE: i32 = 0;
pub(crate) const RECEIVE_QUEUE: i32 = 1;
pub(crate) const SEND_QUEUE: i32 = 2;

/// SO_BUF_LOCK: which buffer sizes the program has set; the kernel adjusts the others.
pub(crate) const BUFFER_LOCK: i32 = 72;

/// The record of a connection before its queues and parameters are read.
pub(crate) fn unread(state: TcpState, peer: SocketAddr) -> Connection {
    Connection {
        state,
        peer,
        sent: Bytes::default(),
        unsent: Bytes::default(),
        sent_sequence: 0,
        received: Bytes::default(),
        received_sequence: 0,
        segment_bytes: 0,
        scales: None,
        selective: false,
        timestamp: None,
        window: [0; 5],
        buffers_bytes: (0, 0),
        buffers_locked: 0,
    }
}
