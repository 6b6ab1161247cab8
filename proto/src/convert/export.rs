//! Handles, claims and announcements.

use super::{ConvertError, fixed, id_bytes, id128, incarnation};
use crate::pd::v1;
use tidemill_core::{
    Capability, Digest, Endpoint, Epoch, KvHandle, LayerGroupIdx, NodeId, RequestId, Slice,
    Timestamp,
};

/// Most endpoints in a handle.
const ENDPOINTS_MAX: usize = 8;

impl From<&Endpoint> for v1::Endpoint {
    fn from(endpoint: &Endpoint) -> Self {
        Self {
            transport: endpoint.transport.name().to_owned(),
            address: endpoint.address.clone(),
        }
    }
}

/// Reads endpoints; transports that this build does not know are left out, so that a newer peer still pairs.
///
/// # Errors
/// When there are more than eight.
pub(super) fn endpoints(wire: Vec<v1::Endpoint>) -> Result<Vec<Endpoint>, ConvertError> {
    if wire.len() > ENDPOINTS_MAX {
        return Err(ConvertError::new(
            "endpoints",
            format!(
                "has {} entries; at most {ENDPOINTS_MAX} are allowed",
                wire.len()
            ),
        ));
    }
    Ok(wire
        .into_iter()
        .filter_map(|endpoint| {
            Some(Endpoint {
                transport: endpoint.transport.parse().ok()?,
                address: endpoint.address,
            })
        })
        .collect())
}

impl From<&KvHandle> for v1::KvHandle {
    fn from(handle: &KvHandle) -> Self {
        Self {
            request_id: id_bytes(handle.request_id.0),
            node_id: handle.node_id.as_str().to_owned(),
            incarnation: id_bytes(handle.incarnation.0),
            capability: id_bytes(handle.capability.0),
            epoch: handle.epoch.0,
            n_tokens: handle.n_tokens,
            layout_fingerprint: handle.layout_fingerprint.to_vec(),
            control_address: handle.control_address.clone(),
            endpoints: handle.endpoints.iter().map(Into::into).collect(),
            expires_at_us: handle.expires_at.0,
        }
    }
}

impl TryFrom<v1::KvHandle> for KvHandle {
    type Error = ConvertError;

    fn try_from(wire: v1::KvHandle) -> Result<Self, ConvertError> {
        Ok(Self {
            request_id: RequestId(id128("handle.request_id", &wire.request_id)?),
            node_id: NodeId::new(wire.node_id)
                .map_err(|problem| ConvertError::new("handle.node_id", problem))?,
            incarnation: incarnation("handle.incarnation", &wire.incarnation)?,
            capability: Capability(id128("handle.capability", &wire.capability)?),
            epoch: Epoch(wire.epoch),
            n_tokens: wire.n_tokens,
            layout_fingerprint: fixed("handle.layout_fingerprint", &wire.layout_fingerprint)?,
            control_address: wire.control_address,
            endpoints: endpoints(wire.endpoints)?,
            expires_at: Timestamp(wire.expires_at_us),
        })
    }
}

impl From<(Slice, Digest)> for v1::SliceDigest {
    fn from((slice, digest): (Slice, Digest)) -> Self {
        Self {
            ordinal: slice.ordinal,
            group: slice.group.0,
            digest: digest.0,
        }
    }
}

impl From<v1::SliceDigest> for (Slice, Digest) {
    fn from(wire: v1::SliceDigest) -> Self {
        let slice = Slice {
            ordinal: wire.ordinal,
            group: LayerGroupIdx(wire.group),
        };
        (slice, Digest(wire.digest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_core::{Incarnation, TransportKind};

    fn handle() -> KvHandle {
        KvHandle {
            request_id: RequestId(1),
            node_id: NodeId::new("prefill-0").expect("valid"),
            incarnation: Incarnation(2),
            capability: Capability(3),
            epoch: Epoch(4),
            n_tokens: 5,
            layout_fingerprint: [6; 16],
            control_address: "127.0.0.1:7001".into(),
            endpoints: vec![Endpoint {
                transport: TransportKind::Tcp,
                address: "127.0.0.1:7101".into(),
            }],
            expires_at: Timestamp(8),
        }
    }

    #[test]
    fn a_handle_survives_the_wire() {
        assert_eq!(
            KvHandle::try_from(v1::KvHandle::from(&handle())),
            Ok(handle())
        );
    }

    #[test]
    fn an_unknown_transport_is_left_out() {
        let mut wire = v1::KvHandle::from(&handle());
        wire.endpoints.push(v1::Endpoint {
            transport: "carrier-pigeon".into(),
            address: "roof".into(),
        });
        assert_eq!(KvHandle::try_from(wire), Ok(handle()));
    }

    #[test]
    fn a_bad_field_is_named() {
        let mut wire = v1::KvHandle::from(&handle());
        wire.node_id = "a/b".into();
        let error = KvHandle::try_from(wire).expect_err("slash");
        assert_eq!(error.field, "handle.node_id");
    }
}
