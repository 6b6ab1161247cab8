//! Load reports.

use super::{ConvertError, id_bytes, incarnation};
use crate::pd::v1;
use tidemill_core::{LoadReport, NodeId, Role};

/// Reads a role's name.
fn role(name: &str) -> Result<Role, ConvertError> {
    [Role::Prefill, Role::Decode]
        .into_iter()
        .find(|role| role.name() == name)
        .ok_or_else(|| ConvertError::new("role", format!("{name:?} is neither prefill nor decode")))
}

impl From<&LoadReport> for v1::LoadReport {
    fn from(report: &LoadReport) -> Self {
        Self {
            node_id: report.node_id.as_str().to_owned(),
            incarnation: id_bytes(report.incarnation.0),
            role: report.role.name().to_owned(),
            sequence_number: report.sequence_number,
            n_waiting: report.n_waiting,
            n_running: report.n_running,
            queued_tokens: report.queued_tokens,
            n_blocks: report.n_blocks,
            n_blocks_free: report.n_blocks_free,
            n_blocks_leased: report.n_blocks_leased,
            draining: report.draining,
        }
    }
}

impl TryFrom<v1::LoadReport> for LoadReport {
    type Error = ConvertError;

    fn try_from(wire: v1::LoadReport) -> Result<Self, ConvertError> {
        Ok(Self {
            node_id: NodeId::new(wire.node_id)
                .map_err(|problem| ConvertError::new("node_id", problem))?,
            incarnation: incarnation("incarnation", &wire.incarnation)?,
            role: role(&wire.role)?,
            sequence_number: wire.sequence_number,
            n_waiting: wire.n_waiting,
            n_running: wire.n_running,
            queued_tokens: wire.queued_tokens,
            n_blocks: wire.n_blocks,
            n_blocks_free: wire.n_blocks_free,
            n_blocks_leased: wire.n_blocks_leased,
            draining: wire.draining,
        })
    }
}

/// What a node is, checked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeDescription {
    /// Its name.
    pub node_id: NodeId,
    /// Its present life.
    pub incarnation: tidemill_core::Incarnation,
    /// What it does.
    pub role: Role,
    /// The name under which clients ask for the model.
    pub model_name: String,
    /// Weights, config and text.
    pub model_fingerprint: [u8; 32],
    /// Vocabulary and template: what router and node must share.
    pub text_fingerprint: [u8; 32],
    /// Only equal ones exchange KV.
    pub layout_fingerprint: [u8; 16],
    /// Revision of the hand-off messages.
    pub protocol_revision: u32,
    /// Token ids lie below this.
    pub vocab_size: u32,
    /// Most tokens in a sequence.
    pub context_length: u32,
    /// Where it exports KV.
    pub endpoints: Vec<tidemill_core::Endpoint>,
    /// Software version.
    pub version: String,
}

impl From<&NodeDescription> for v1::NodeDescription {
    fn from(node: &NodeDescription) -> Self {
        Self {
            node_id: node.node_id.as_str().to_owned(),
            incarnation: id_bytes(node.incarnation.0),
            role: node.role.name().to_owned(),
            model_name: node.model_name.clone(),
            model_fingerprint: node.model_fingerprint.to_vec(),
            text_fingerprint: node.text_fingerprint.to_vec(),
            layout_fingerprint: node.layout_fingerprint.to_vec(),
            protocol_revision: node.protocol_revision,
            vocab_size: node.vocab_size,
            context_length: node.context_length,
            endpoints: node.endpoints.iter().map(Into::into).collect(),
            version: node.version.clone(),
        }
    }
}

impl TryFrom<v1::NodeDescription> for NodeDescription {
    type Error = ConvertError;

    fn try_from(wire: v1::NodeDescription) -> Result<Self, ConvertError> {
        Ok(Self {
            node_id: NodeId::new(wire.node_id)
                .map_err(|problem| ConvertError::new("node_id", problem))?,
            incarnation: incarnation("incarnation", &wire.incarnation)?,
            role: role(&wire.role)?,
            model_name: wire.model_name,
            model_fingerprint: super::fixed("model_fingerprint", &wire.model_fingerprint)?,
            text_fingerprint: super::fixed("text_fingerprint", &wire.text_fingerprint)?,
            layout_fingerprint: super::fixed("layout_fingerprint", &wire.layout_fingerprint)?,
            protocol_revision: wire.protocol_revision,
            vocab_size: wire.vocab_size,
            context_length: wire.context_length,
            endpoints: super::export::endpoints(wire.endpoints)?,
            version: wire.version,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_core::Incarnation;

    #[test]
    fn a_report_survives_the_wire() {
        let report = LoadReport {
            node_id: NodeId::new("decode-1").expect("valid"),
            incarnation: Incarnation(9),
            role: Role::Decode,
            sequence_number: 3,
            n_waiting: 1,
            n_running: 2,
            queued_tokens: 300,
            n_blocks: 64,
            n_blocks_free: 10,
            n_blocks_leased: 4,
            draining: true,
        };
        let wire = v1::LoadReport::from(&report);
        assert_eq!(LoadReport::try_from(wire), Ok(report));
    }

    #[test]
    fn an_unknown_role_is_refused() {
        assert!(role("both").is_err());
    }
}
