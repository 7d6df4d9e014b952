/* The record shared by the handshake program and its loader (mod.rs). Only add at the end. */
#ifndef DORMOUSE_HANDSHAKE_RECORD_H
#define DORMOUSE_HANDSHAKE_RECORD_H

/* The options that both sides of a connection negotiated. dm_handshake has one entry: the loader sets
 * it before each packet that it sends, so the map cannot be full. */
struct dm_handshake {
	__u32 mark; /* of the packet that ends the handshake */
	__u32 timestamp; /* our clock of time stamps */
	__u16 segment_bytes; /* largest segment that the peer takes */
	__u8 scale_sent; /* window scales, of what is sent and of what is received */
	__u8 scale_received;
	__u8 scales; /* 0 or 1, as the next two: the options that were negotiated */
	__u8 selective;
	__u8 timestamps;
	__u8 v6; /* 0 or 1: the listening socket is found by IPv6 */
	__u32 address[4]; /* at this address; by IPv4 the first alone */
	__be16 port; /* and this port */
	__u16 reserved;
};

#endif
