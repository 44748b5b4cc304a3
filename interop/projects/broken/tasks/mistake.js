module.exports = async (payload => {};
